"""A folder for what an engine of DeepSpeed keeps in files ("nvme"): nobody else writes there, and it goes with it.

DeepSpeed names files by a rank alone, and removes what an earlier engine has left under that name: two runs, or two
engines of one process, would write over each other's. All lie in one hidden folder a user, which nobody else may enter:

    nvme_path/.megatfm-offload-UID/lock
    nvme_path/.megatfm-offload-UID/HOST-xxxxxxxx/megatfm-offload.json   locked as long as the engine lives
"""

import fcntl
import os
import re
import socket
import stat
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import IO

from megatfm.errors import UsageError

MARK = "megatfm-offload.json"
"""The file by which we know a folder as one of ours; its lock says whether the engine lives."""
CONTENT = b'{"made by": "megatfm, for what DeepSpeed offloads: removed with its run"}\n'


class OffloadDirectory:
    """A new folder in `path`, locked as long as its engine lives. Raises UsageError where none can be made or used."""

    def __init__(self, path: Path) -> None:
        self._lock: IO[bytes] | None = None
        way_out = "name a folder on a local disk in deepspeed.nvme_path, or set deepspeed.offload_… = 'cpu'"
        if not path.is_dir():
            raise UsageError(
                f"deepspeed.nvme_path = {str(path)!r} is no folder of this machine: make it, or {way_out}"
            )
        try:
            parent = _folder_of_user(path)
            with (parent / "lock").open("ab") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
                _remove_stale(parent, host)
                self.path = Path(tempfile.mkdtemp(prefix=f"{host}-", dir=parent))
                (self.path / MARK).write_bytes(CONTENT)
                self._lock = _lock_mark(self.path)
        except OSError as error:
            self.remove()
            raise UsageError(
                f"deepspeed.nvme_path = {str(path)!r} can't be written ({error.strerror}): {way_out}"
            ) from None

    def remove(self) -> None:
        """Nobody needs the files any more."""
        if self._lock:
            rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _folder_of_user(path: Path) -> Path:
    """This user's folder of offloaded files, made where there is none. Raises OSError."""
    parent = path / f".megatfm-offload-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(0, f"{parent} is another user's, or no folder: remove it")
    return parent


def _lock_mark(folder: Path) -> IO[bytes]:
    """Lock the mark of a folder until it is closed, which the system does where a process dies. Raises OSError."""
    file = os.fdopen(os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _remove_stale(parent: Path, host: str) -> None:
    """Remove what killed processes of this host have left: a run that goes on reads its checkpoint.

    Whether one of another host lives can't be seen here, since not every filesystem's locks cross machines.
    """
    for folder in parent.iterdir():
        if not re.fullmatch(rf"{re.escape(host)}-[a-z0-9_]{{8}}", folder.name) or folder.is_symlink():
            continue
        try:
            with _lock_mark(folder) as mark:
                if mark.read(len(CONTENT) + 1) == CONTENT:
                    rmtree(folder, ignore_errors=True)
        except OSError:  # it lives, or isn't ours
            continue
