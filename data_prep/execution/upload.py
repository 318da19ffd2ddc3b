"""Upload of a corpus whose `out` is a URL: built in a local folder; each file is sent when it is final."""

import fcntl
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from megatfm.corpus.files import write_whole
from megatfm.corpus.remote import RemoteFile, RemoteFolder
from megatfm.errors import UsageError
from megatfm.files import hash_content

RESULT_FILE = "prep.json"
IN_PROGRESS_FILE = ".prep-begun.json"
"""Name of the marker that says who is uploading, until the corpus is complete."""
ID = ".prep-id"
"""Identifies a work folder, on whichever machine."""


class RemoteOutput:
    """Sends files of `folder` to a URL. Notes on sent files lie in `notes`, so that none is sent again after a kill.

    output_names: files and folders of a corpus; no others are touched.
    """

    def __init__(self, url: str, folder: Path, notes: Path, output_names: Sequence[str]) -> None:
        self.url = url.rstrip("/")
        self._remote = RemoteFolder(self.url)
        self._folder, self._notes, self._output_names = folder, notes, output_names

    def start(self, overwrite: bool) -> None:
        """Write the marker. overwrite: whether another prep's unfinished files may be removed.

        Raises UsageError if other files are at the URL, or nothing can be written there.
        """
        with self._hold_folder_lock():
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
            if foreign := self._remote.list_files():
                raise UsageError(
                    f"{self.url}: holds {foreign[0].name!r}, which no prep made: choose a new or an empty place as out"
                )
            self.write_marker()

    def write_marker(self) -> None:
        """Write the marker that says who is uploading."""
        marker = {"host": socket.gethostname(), "folder": str(self._folder), "id": self._id}
        self._write(IN_PROGRESS_FILE, marker)

    def _is_ours(self, marker: Mapping[str, Any]) -> bool:
        """Return whether a marker is of this work folder, from whichever machine."""
        if "id" in marker:
            return bool(marker["id"] == self._id)
        # Written by an earlier version.
        return marker == {"host": socket.gethostname(), "folder": str(self._folder)}

    @cached_property
    def _id(self) -> str:
        """A random number in the work folder; read and written by one process at a time."""
        path = self._folder / ID
        if not path.exists():
            write_whole(path, uuid4().hex.encode())
        return path.read_text()

    @contextmanager
    def _hold_folder_lock(self) -> Iterator[None]:
        """Keep other processes from starting in this folder meanwhile, if the file system has locks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / f"{ID}.lock", "ab") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self, name: str) -> Any:
        """Read a JSON table by its name; None if it doesn't exist. Raises UsageError if it is no table."""
        file = self._remote.stat(name)
        if file is None:
            return None
        try:
            table = json.loads(self._remote.read_head(file, file.size))
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise UsageError(f"{self.url}: {name} is not what a prep writes: choose a new or an empty place as out")
        return table

    def has(self, name: str) -> bool:
        """Return whether a file exists at the URL."""
        return self._remote.stat(name) is not None

    def upload(self, path: Path, keep: bool = False) -> None:
        """Upload a file, unless it was uploaded before, and remove the local copy unless `keep`."""
        name = path.relative_to(self._folder).as_posix()
        note = self._notes / f"{name.replace('/', '.')}.json"
        with open(path, "rb") as file:
            fingerprint = hash_content(file)
        if self._read_sent_hash(note, name) != fingerprint:
            remote_file = self._remote.upload(path, name)
            note.parent.mkdir(parents=True, exist_ok=True)
            record = {"blake3": fingerprint, "stamp": remote_file.version, "size": remote_file.size}
            write_whole(note, json.dumps(record).encode())
        if not keep:
            path.unlink()

    def remove_stale(self, names: Iterable[str]) -> None:
        """Remove files of an interrupted prep with another config, those not in `names`."""
        current_names = set(names)
        for file in self._remote.list_files():
            if file.name not in current_names and file.name.partition("/")[0] in self._output_names:
                self._remote.remove(file.name)

    def remove_marker(self) -> None:
        """Remove the marker: the corpus is complete."""
        self._remote.remove(IN_PROGRESS_FILE)

    def remove_all(self) -> None:
        """Remove a corpus: first the file that commits it."""
        self._remote.remove(RESULT_FILE)
        self.remove_stale(())
        self.remove_marker()

    def _read_sent_hash(self, note: Path, name: str) -> str | None:
        """Return the hash of the file sent under a name, if it is still there."""
        if not note.exists():
            return None
        record = json.loads(note.read_bytes())
        remote_file = self._remote.stat(name)
        return record["blake3"] if remote_file == RemoteFile(name, record["size"], record["stamp"]) else None

    def _write(self, name: str, value: Any) -> None:
        path = self._notes / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value).encode())
        self._remote.upload(path, name)
