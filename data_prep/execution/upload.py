"""Upload of a corpus whose `out` is a URL: made in a folder of this machine; each file is sent when it is final."""

import fcntl
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from blake3 import blake3

from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import write_whole
from megatfm.corpus.remote import RemoteFile, RemoteFolder
from megatfm.errors import UsageError

RESULT_FILE = "prep.json"
IN_PROGRESS_FILE = ".prep-begun.json"
"""Says there who is at work, until all is there."""
ID = ".prep-id"
"""Tells who works in a folder from all others, on whichever machine."""
DEFAULT_SCRATCH = Path("~/.cache/megatfm/prep")


def local_folder(config: PrepConfig) -> Path:
    """Where a corpus is made: `out`, or for a URL a folder of its own in `scratch`."""
    if "://" not in config.out:
        return Path(config.out)
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", config.out.rstrip("/"))[-80:]
    root = Path(config.scratch) if config.scratch else DEFAULT_SCRATCH.expanduser()
    return root / f"{name}-{blake3(config.out.rstrip('/').encode()).hexdigest(6)}"


class RemoteOutput:
    """Sends files of `folder` to a URL. What was sent is noted in `notes`, so that it isn't sent again after a kill.

    made: files and folders that a prep makes; it touches no others.
    """

    def __init__(self, url: str, folder: Path, notes: Path, output_names: Sequence[str]) -> None:
        self.url = url.rstrip("/")
        self._there = RemoteFolder(self.url)
        self._folder, self._notes, self._output_names = folder, notes, output_names

    def start(self, overwrite: bool) -> None:
        """Say who is at work. A UsageError if anything else is there, or nothing can be written there. overwrite:
        whether what another prep has begun may go."""
        with self._one_at_a_time():
            mark = self.read(IN_PROGRESS_FILE)
            if mark is not None and self._is_ours(mark):
                return
            if mark is not None and overwrite:
                self.remove_all()
            elif mark is not None:
                raise UsageError(
                    f"{self.url}: a prep began here on {mark.get('host')}, in {mark.get('folder')}: let that one go "
                    "on (several machines share the work if scratch is a folder that all of them see), or begin anew "
                    "with overwrite=true"
                )
            if strangers := self._there.files():
                raise UsageError(
                    f"{self.url}: holds {strangers[0].name!r}, which no prep made: choose a new or an empty place as "
                    "out"
                )
            self.write_marker()

    def write_marker(self) -> None:
        """Say who is at work."""
        mine = {"host": socket.gethostname(), "folder": str(self._folder), "id": self._id}
        self._write(IN_PROGRESS_FILE, mine)

    def _is_ours(self, mark: Mapping[str, Any]) -> bool:
        """Whether a mark is that of who works in this folder, from whichever machine."""
        if "id" in mark:
            return bool(mark["id"] == self._id)
        return mark == {"host": socket.gethostname(), "folder": str(self._folder)}  # by an earlier version

    @cached_property
    def _id(self) -> str:
        """A random number that lies in the folder; read and written by one process at a time."""
        path = self._folder / ID
        if not path.exists():
            write_whole(path, uuid4().hex.encode())
        return path.read_text()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Let no other process begin in this folder meanwhile, where the file system has locks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / f"{ID}.lock", "ab") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self, name: str) -> Any:
        """The table in JSON of that name there; None if there is none. A UsageError if it is anything else."""
        file = self._there.stat(name)
        if file is None:
            return None
        try:
            table = json.loads(self._there.read_head(file, file.size))
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise UsageError(
                f"{self.url}: {name} is not what a prep writes: choose a new or an empty place as out"
            )
        return table

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return self._there.stat(name) is not None

    def send(self, path: Path, keep: bool = False) -> None:
        """Send a file, unless it is there already, and remove it here."""
        name = path.relative_to(self._folder).as_posix()
        note = self._notes / f"{name.replace('/', '.')}.json"
        fingerprint = blake3().update_mmap(path).hexdigest()
        if self._known(note, name) != fingerprint:
            sent = self._there.upload(path, name)
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(
                note, json.dumps({"blake3": fingerprint, "stamp": sent.version, "size": sent.size}).encode()
            )
        if not keep:
            path.unlink()

    def remove_stale(self, names: Iterable[str]) -> None:
        """Remove what else a prep has made there, which was interrupted and went on with another config."""
        kept = set(names)
        for file in self._there.files():
            if file.name not in kept and file.name.partition("/")[0] in self._output_names:
                self._there.remove(file.name)

    def remove_marker(self) -> None:
        """All is there."""
        self._there.remove(IN_PROGRESS_FILE)

    def remove_all(self) -> None:
        """Remove all that a prep has made: first the file that says that it is whole."""
        self._there.remove(RESULT_FILE)
        self.remove_stale(())
        self.remove_marker()

    def _known(self, note: Path, name: str) -> str | None:
        """The hash of what was sent under a name, if it is still there."""
        if not note.exists():
            return None
        record = json.loads(note.read_bytes())
        remote_file = self._there.stat(name)
        return record["blake3"] if remote_file == RemoteFile(name, record["size"], record["stamp"]) else None

    def _write(self, name: str, value: Any) -> None:
        path = self._notes / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value).encode())
        self._there.upload(path, name)
