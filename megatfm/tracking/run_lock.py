"""The lock on a run directory, by which one job at a time writes there: it ends with its holder, on any file system.

The kernel's lock (flock) ends with the process, on one machine and on filesystems that know locks across machines.
Where they don't, the file's time of change says whether its holder lives: it moves every few seconds.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

from megatfm.checkpoint.chunked_io import note_progress
from megatfm.errors import LockedError, MegatfmError

HEARTBEAT_SECONDS = 4.0
STALE_SECONDS = 90.0
"""A holder on another machine whose file hasn't moved for so long is dead: longer than file servers that stumble, and
than NFS clients remember a time of change (60 s by default)."""
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_log = logging.getLogger("megatfm")
_descriptors: set[int] = set()


def _close_in_child() -> None:
    """A forked process would hold the lock as long as it lives, whatever becomes of the one that took it."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """The lock on a run directory: `RUN/lock`, which names its holder in JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._locked_file: tuple[int, int] | None = None  # while it is open, no other file gets its number
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock, or raise LockedError that names the holder. Raises OSError if the file can't be written."""
        file = self._open_and_lock()
        while not self._is_at_path(file):  # its last holder removed it before it was locked here
            os.close(file)
            file = self._open_and_lock()
        _descriptors.add(file)
        self._file = file
        self.remember_file()
        self._thread = threading.Thread(target=self._keep_alive, name="megatfm-lock", daemon=True)
        self._thread.start()

    def _open_and_lock(self) -> int:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise MegatfmError(
                f"{self.path} is a symbolic link, and what it points to would be overwritten: remove it"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise MegatfmError(f"{self.path} is no file, so it can't be locked: remove it")
            holder = _read_holder(file)
            if not _try_lock(file) or (
                holder and holder["host"] != socket.gethostname() and self._mtime_advances(holder)
            ):
                raise LockedError(self._refusal(holder))
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_holder_info()).encode() + b"\n", 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def _is_at_path(self, file: int) -> bool:
        """Return whether an open file is still the one under the lock's name, as far as its server reports."""
        status = os.fstat(file)
        try:
            return self._file_id() == (status.st_dev, status.st_ino)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def remember_file(self) -> None:
        """Remember which file it is. On the ranks that don't hold it themselves, once it is held."""
        with contextlib.suppress(
            OSError
        ):  # a file server may be slow to show one machine the files of another
            self._locked_file = self._file_id()

    def is_in_place(self) -> bool:
        """Return whether the run directory still holds that file: else it was removed, moved or replaced."""
        if self._locked_file is None:
            return True
        try:
            return self._file_id() == self._locked_file
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file server that doesn't answer has removed nothing
            return True

    def _file_id(self) -> tuple[int, int]:
        status = self.path.stat(follow_symlinks=False)
        return status.st_dev, status.st_ino

    def release(self) -> None:
        """Give the lock back, and leave the file empty: there is no need to wait for a sign of life."""
        if self._file is None:
            return
        self._released.set()
        self._thread.join(HEARTBEAT_SECONDS)
        if self._file in _descriptors:  # else this is a forked process, which never held it
            with contextlib.suppress(
                OSError
            ):  # a file server that doesn't answer loses us nothing but a wait
                os.ftruncate(self._file, 0)
            _descriptors.discard(self._file)
            os.close(self._file)
        self._file = None

    def _keep_alive(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            if self._file is not None:
                with contextlib.suppress(OSError):  # the next touch may get through
                    os.utime(self._file)

    def _mtime_advances(self, holder: dict[str, Any]) -> bool:
        """Return whether a process on another machine still touches the file; compares no clocks."""
        _log.warning(
            "%s names process %s on %s: looking for up to %.0f s whether that still trains",
            self.path, holder["pid"], holder["host"], STALE_SECONDS,
        )  # fmt: skip
        first = _changed(self.path)
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 8)
            note_progress()
            if _changed(self.path) != first:
                return True
        return False

    def _refusal(self, holder: dict[str, Any]) -> str:
        job = f", job {holder['job']}" if holder.get("job") else ""
        holder_name = f" (process {holder['pid']} on {holder['host']}{job})" if holder else ""
        return (
            f"{self.path.parent}: another process is training in this run directory{holder_name}: wait for it or give "
            "another name"
        )


def _holder_info() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "time": time.time(),
    }


def _read_holder(file: int) -> dict[str, Any]:
    """Return the holder of the lock, or the last one, if it died; empty where it was released."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except (ValueError, RecursionError):  # empty, or torn by a kill
        return {}
    holder_fields = (
        isinstance(holder, dict) and isinstance(holder.get("host"), str) and type(holder.get("pid")) is int
    )
    return holder if holder_fields and 0 < holder["pid"] < 2**31 else {}


def _try_lock(file: int) -> bool:
    """Return whether the kernel gives us the lock; where it knows no locks here, the other signs must do."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in NO_LOCKS:
            raise
        holder = _read_holder(file)
        return not (holder.get("host") == socket.gethostname() and _pid_exists(holder["pid"]))
    return True


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _changed(path: Path) -> int | None:
    """Return the mtime of the file as its server knows it: opened anew, since clients remember times of open files."""
    try:
        file = os.open(path, os.O_RDONLY | FLAGS)
    except OSError:
        return None
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)
