"""The lock of a run directory, so that only one job trains there. It ends with its holder, on any file system.

A kernel lock (flock) ends with its process, on one machine and on file systems that support locks across machines. For
other file systems, the holder also updates the lock file's mtime every few seconds, as a heartbeat.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatfm.checkpoint.chunked_io import note_progress
from megatfm.errors import LockedError, MegatfmError
from megatfm.files import is_copied_record

HEARTBEAT_SECONDS = 4.0
STALE_SECONDS = 90.0
"""Time without a heartbeat after which a holder on another machine counts as dead: longer than hiccups of file servers,
and than NFS clients cache an mtime (60 s by default)."""
HANDOVER_SECONDS = 90.0
"""Time that a SLURM job waits for another job's lock. SLURM counts a job that lost a node as ended while its processes
still save, for which they have KillWait, 30 s by default."""
NAMELESS_POLLS = 8
"""Polls for which a lock may be held while its file names no holder: it is being taken or released at this moment."""
MAX_HOLDER_BYTES = 2**16
"""Bytes of a lock file that are read: more than the longest path, which JSON may escape, and the rest of a holder."""
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of flock on file systems without locks."""

_log = logging.getLogger("megatfm")
_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Close the lock's descriptor in a forked child, which would otherwise hold the lock after its parent has ended."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """The lock of a run directory: the file `RUN/lock`, which describes its holder in JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._file_id: tuple[int, int] | None = None  # device and inode, unique while the file is open
        self._holder: dict[str, Any] = {}  # as the file described it before this process took the lock
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock. Raises LockedError that names the holder, OSError if the file can't be written.

        One SLURM job waits for another, which may be ending.
        """
        file = self._wait_and_lock()
        while not self._is_at_path(file):  # the last holder removed the file before it was locked here
            os.close(file)
            file = self._wait_and_lock()
        _descriptors.add(file)
        self._file = file
        self.remember_file()
        self._thread = threading.Thread(target=self._keep_alive, name="megatfm-lock", daemon=True)
        self._thread.start()

    def _wait_and_lock(self) -> int:
        deadline, n_nameless = None, 0
        while True:
            try:
                return self._open_and_lock()
            except LockedError as error:
                n_nameless = 0 if self._holder else n_nameless + 1
                may_be_ending = "SLURM_JOB_ID" in os.environ and self._holder.get("job") is not None
                if may_be_ending and deadline is None:
                    deadline = time.monotonic() + HANDOVER_SECONDS
                    _log.warning("%s. Waiting up to %.0f s, since that job may be ending", error, HANDOVER_SECONDS)
                is_handover = may_be_ending and deadline is not None and time.monotonic() < deadline
                if not is_handover and not 0 < n_nameless <= NAMELESS_POLLS:
                    raise
            time.sleep(HEARTBEAT_SECONDS / 8)
            note_progress()

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
                raise MegatfmError(f"{self.path} is not a regular file, so it can't be locked: remove it")
            self._holder = holder = _read_holder(file, self.path.parent)
            is_foreign = holder and holder["host"] != socket.gethostname()
            if not _try_lock(file, holder) or (is_foreign and self._does_mtime_advance(holder, file)):
                raise LockedError(self._describe_holder(holder))
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_describe_this_process(self.path.parent)).encode() + b"\n", 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def _is_at_path(self, file: int) -> bool:
        """Return whether an open file is still the one at the lock's path, as far as the file server knows."""
        status = os.fstat(file)
        try:
            return self._read_file_id() == (status.st_dev, status.st_ino)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def remember_file(self) -> None:
        """Remember the lock file's identity, for `is_in_place`. Other ranks call this once rank 0 has the lock."""
        with contextlib.suppress(OSError):  # other machines may see the file only later
            self._file_id = self._read_file_id()

    def is_in_place(self) -> bool:
        """Return False if the lock file, or the run directory with it, was removed, moved or replaced."""
        if self._file_id is None:
            return True
        try:
            return self._read_file_id() == self._file_id
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the file server doesn't answer, which says nothing about the file
            return True

    def _read_file_id(self) -> tuple[int, int]:
        status = self.path.stat(follow_symlinks=False)
        return status.st_dev, status.st_ino

    def release(self) -> None:
        """Release the lock, and empty the file, so that the next holder need not wait for heartbeats."""
        if self._file is None:
            return
        self._released.set()
        self._thread.join(HEARTBEAT_SECONDS)
        if self._file in _descriptors:  # else this is a forked process, which never held it
            with contextlib.suppress(OSError):  # the next holder then waits for heartbeats
                os.ftruncate(self._file, 0)
            _descriptors.discard(self._file)
            os.close(self._file)
        self._file = None

    def _keep_alive(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            if self._file is not None:
                with contextlib.suppress(OSError):  # try again at the next heartbeat
                    os.utime(self._file)

    def _does_mtime_advance(self, holder: dict[str, Any], file: int) -> bool:
        """Return whether the mtime changes, so that the holder on another machine lives. Doesn't compare clocks.

        If the file then names no holder, the lock was released.
        """
        _log.warning(
            "%s names process %s on %s: waiting up to %.0f s for a sign that it still trains",
            self.path, holder["pid"], holder["host"], STALE_SECONDS,
        )  # fmt: skip
        first = _read_mtime(self.path)
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 8)
            note_progress()
            if _read_mtime(self.path) != first:
                time.sleep(HEARTBEAT_SECONDS)  # another waiting process empties the file just before it writes its name
                return bool(_read_holder(file, self.path.parent))
        return False

    def _describe_holder(self, holder: dict[str, Any]) -> str:
        job = f", job {holder['job']}" if holder.get("job") else ""
        holder_name = f" (process {holder['pid']} on {holder['host']}{job})" if holder else ""
        return (
            f"{self.path.parent}: another process is training in this run directory{holder_name}: wait for it, or give "
            "this run another name"
        )


def _describe_this_process(run: Path) -> dict[str, Any]:
    return {
        "run": str(run.absolute()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "time": time.time(),
    }


def _read_holder(file: int, run: Path) -> dict[str, Any]:
    """Return the holder that a run's lock file describes, which may have died; empty if it has released the lock, or if
    the file was copied here with another run."""
    try:
        holder = json.loads(os.pread(file, MAX_HOLDER_BYTES, 0))
    except (ValueError, RecursionError):  # empty, or its writer was killed
        return {}
    is_valid = isinstance(holder, dict) and isinstance(holder.get("host"), str) and type(holder.get("pid")) is int
    return holder if is_valid and 0 < holder["pid"] < 2**31 and not is_copied_record(holder, run) else {}


def _try_lock(file: int, holder: Mapping[str, Any]) -> bool:
    """Try to take the kernel's lock; without support for locks, return whether no live process here holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in UNSUPPORTED:
            raise
        return not (holder.get("host") == socket.gethostname() and _is_process_alive(holder["pid"]))
    return True


def _is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read_mtime(path: Path) -> int | None:
    """Return a file's mtime in ns as the file server knows it. Opening the file makes NFS clients ask the server."""
    try:
        file = os.open(path, os.O_RDONLY | FLAGS)
    except OSError:
        return None
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)
