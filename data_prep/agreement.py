"""The settings for which a folder is being prepared, on which all who work there at the same time agree."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatfm.data.files import write_whole
from megatfm.errors import MegatfmError, UsageError

CONFIG = "config.json"
_SECONDS = 10.0
"""How long the first of several may take to write its settings down."""


class Agreement:
    """Holds a lock in the work folder: alone, a process may say what the settings are; others must have the same.

    The lock is on a file, as network file systems keep locks on folders to one machine, and dies with its process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def settle(self, settings: Mapping[str, Any], shared: bool) -> dict[str, Any] | None:
        """Write `settings` if nobody else is at work, else compare: returns those of the others if they differ.

        shared: whether others may be at work. Raises UsageError if they are and mustn't, MegatfmError if the first of
        them doesn't say what its settings are.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "tasks"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        settings = json.loads(json.dumps(settings))
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            if self._lock(fcntl.LOCK_EX):
                write_whole(self._folder / CONFIG, json.dumps(settings, indent=2).encode())
                # Another may slip in between the two locks: then it has written what counts.
                if not shared or self._lock(fcntl.LOCK_SH):
                    return None
            elif not shared:
                raise UsageError(
                    f"{self._folder.parent}: another prep is working here: wait for it, or choose another out"
                )
            elif self._lock(fcntl.LOCK_SH):
                theirs: dict[str, Any] = json.loads((self._folder / CONFIG).read_bytes())
                return None if theirs == settings else theirs
            time.sleep(0.02)
        raise MegatfmError(
            f"{path}: another task holds this lock and doesn't say what it prepares: end it, or start again later"
        )

    def close(self) -> None:
        """Leave the others."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, kind: int) -> bool:
        """Whether the lock is had. Without locks on this file system there is nobody to agree with."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
