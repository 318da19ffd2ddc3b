"""A folder for what an engine of DeepSpeed keeps in files ("nvme"): nobody else writes there, and it goes with it.

DeepSpeed names files by a rank alone, and removes what an earlier engine has left under that name: two runs, or two
engines of one process, would write over each other's.
"""

import fcntl
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import IO

from megatfm.errors import UsageError

PREFIX = "megatfm-"


class OwnFolder:
    """A new folder in `path`, locked as long as its engine lives. Raises UsageError where none can be made or used."""

    def __init__(self, path: Path) -> None:
        self._lock: IO[bytes] | None = None
        way_out = "name a folder on a local disk in deepspeed.nvme_path, or set deepspeed.offload_… = 'cpu'"
        if not path.is_dir():
            raise UsageError(
                f"deepspeed.nvme_path = {str(path)!r} is no folder of this machine: make it, or {way_out}"
            )
        try:
            with _locked(path / f"{PREFIX}lock", wait=True):
                _remove_left(path)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
                self._lock = _locked(self.path / "lock", wait=True)
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


def _locked(path: Path, *, wait: bool) -> IO[bytes]:
    """A file that is locked until it is closed, which the system does where a process dies."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        raise
    return file


def _remove_left(path: Path) -> None:
    """What killed processes have left: a run that goes on reads its checkpoint."""
    for folder in path.glob(f"{PREFIX}*/"):
        try:
            with _locked(folder / "lock", wait=False):
                rmtree(folder, ignore_errors=True)
        except OSError:  # it lives, or is somebody else's
            continue
