"""Storage of a corpus's files: a local folder, or a URL with a local cache."""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from megatfm.corpus.files import RESTORE, check_size, open_descriptor, read_at, read_range
from megatfm.corpus.remote import DiskError, download_rest, with_retries
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import hash_content, name_disk_errors

MAX_MANIFEST_BYTES = 2**30
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
INDEX_FOLDER = "indexes"
"""Subfolder of the cache for indexes that processes share."""


class ManifestFile(Protocol):
    """An entry of a manifest that describes a file."""

    @property
    def file(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def blake3(self) -> str: ...


class ShardStorage(Protocol):
    """Reads the files of one corpus. `folder`: the corpus folder, or the local cache of a URL."""

    @property
    def folder(self) -> Path: ...

    @property
    def remedy(self) -> str:
        """Advice on what to do about a damaged file, which ends an error message."""
        ...

    def path(self, entry: ManifestFile) -> Path:
        """Return the local path of a file, which may not be fetched yet."""
        ...

    def check(self, entry: ManifestFile) -> None:
        """Raise a MegatfmError if a file is missing or has another size. Fetches nothing."""
        ...

    def read(self, entry: ManifestFile, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file from `offset`. Raises a MegatfmError that names the file."""
        ...

    def open(self, entry: ManifestFile) -> int:
        """Open a file for several reads; return its descriptor, which the caller closes. Raises MegatfmError."""
        ...


@dataclass(frozen=True)
class LocalStorage:
    """The files of a corpus in a local folder."""

    folder: Path

    @property
    def remedy(self) -> str:
        return RESTORE

    def path(self, entry: ManifestFile) -> Path:
        return self.folder / entry.file

    def check(self, entry: ManifestFile) -> None:
        check_size(self.folder / entry.file, entry.bytes)

    def read(self, entry: ManifestFile, offset: int, size: int) -> bytes:
        return read_range(self.folder / entry.file, offset, size)

    def open(self, entry: ManifestFile) -> int:
        return open_descriptor(self.folder / entry.file)


class ShardCacheConfig(NamedTuple):
    """Folder for files from URLs, shared by all processes of a machine, and its limit in bytes."""

    folder: Path = Path("~/.cache/megatfm/shards")
    limit: int = 2**36


@dataclass(frozen=True)
class CachedRemoteStorage:
    """The files of a corpus behind a URL that fsspec can read.

    The first read of a file fetches all of it, in one process of a machine while the others wait. The file gets its
    name once its BLAKE3 hash is the manifest's. The name begins with that hash, so a corpus that replaces another
    behind the same URL uses none of the old files. Above the cache's limit, the least recently read files are removed;
    they are fetched again when they are needed.
    """

    url: str
    cache: ShardCacheConfig

    @cached_property
    def folder(self) -> Path:
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", self.url)[-80:]
        return self.cache.folder.expanduser() / f"{name}-{blake3(self.url.encode()).hexdigest()[:12]}"

    @property
    def remedy(self) -> str:
        return f"delete this file of the cache, and it is fetched again from {self.url}"

    def path(self, entry: ManifestFile) -> Path:
        return self.folder / f"{entry.blake3[:16]}-{entry.file}"

    def check(self, entry: ManifestFile) -> None:
        if entry.bytes > self.cache.limit:
            raise UsageError(
                f"{self.url}: {entry.file} has {entry.bytes:,} bytes, more than data.cache_bytes = "
                f"{self.cache.limit:,}: raise it"
            )

    def read(self, entry: ManifestFile, offset: int, size: int) -> bytes:
        descriptor = self.open(entry)
        try:
            return read_at(descriptor, self.path(entry), offset, size, self.remedy)
        finally:
            os.close(descriptor)

    def open(self, entry: ManifestFile) -> int:
        path = self.path(entry)
        for is_last_try in (False, False, True):
            if not _has_expected_size(path, entry):
                self._fetch(path, entry)
            try:
                descriptor = open_descriptor(path, self.remedy)
            except MegatfmError:
                if is_last_try or path.exists():  # else another process has just evicted it
                    raise
            else:
                with suppress(OSError):
                    os.utime(path)
                return descriptor
        raise AssertionError

    def fetch_manifest(self, name: str) -> bytes:
        """Fetch the manifest's bytes, which are never cached."""
        return with_retries(self.url, name, lambda fs, root: _read_manifest_bytes(fs, f"{root}/{name}"))

    def _fetch(self, path: Path, entry: ManifestFile) -> None:
        with name_disk_errors("write", path, "make room, or choose another folder as data.cache_dir"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _hold_lock(path.with_name(f".{path.name}.lock")):
                if not _has_expected_size(path, entry):  # by another process, while this one waited
                    make_room(self.cache, entry.bytes)
                    self._download(path, entry)

    def _download(self, path: Path, entry: ManifestFile) -> None:
        # The name contains the file's hash, so a later process may continue a killed download.
        partial = path.with_name(f".{path.name}.partial")
        try:
            for _ in range(2 + partial.exists()):
                download_rest(self.url, entry.file, partial, entry.bytes)
                arrived_hash = _hash_and_sync(partial)
                if arrived_hash == entry.blake3:
                    partial.replace(path)
                    return
                partial.unlink()
            raise MegatfmError(
                f"{self.url}/{entry.file}: its BLAKE3 hash is {arrived_hash[:16]}, not the manifest's "
                f"{entry.blake3[:16]} ({entry.bytes} bytes): upload the corpus again"
            )
        except DiskError as error:
            raise error.cause from error
        finally:
            partial.unlink(missing_ok=True)


def open_storage(location: str | Path, cache: ShardCacheConfig) -> LocalStorage | CachedRemoteStorage:
    """Return the storage for a folder or URL. Raises a UsageError for other kinds of locations."""
    if "://" in str(location):
        return CachedRemoteStorage(str(location).rstrip("/"), cache)
    if re.match(r"[a-z]+:", str(location)):
        raise UsageError(f"{location}: is neither a folder nor a URL that can be read: a corpus has no commands to run")
    return LocalStorage(Path(location))


def _hash_and_sync(path: Path) -> str:
    """Sync a file to the disk and return its BLAKE3 hash. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hash_content(file)


def _read_manifest_bytes(fs: Any, path: str) -> bytes:
    with fs.open(path, "rb") as file:
        data: bytes = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise MegatfmError(f"{path}: is larger than any manifest")
    return data


def _has_expected_size(path: Path, entry: ManifestFile) -> bool:
    try:
        return path.stat().st_size == entry.bytes
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise MegatfmError(f"{path}: cannot be read ({error.strerror})") from error


def make_room(cache: ShardCacheConfig, size: int) -> None:
    """Remove the least recently used files of the cache, except mapped ones, until `size` more bytes fit."""
    root = cache.folder.expanduser()
    with _hold_lock(root / ".lock"):
        files = [(path.stat(), path) for path in root.glob("*/[!.]*") if path.is_file()]
        files.sort(key=lambda file: file[0].st_mtime)
        total = sum(status.st_size for status, _ in files)
        for status, path in files:
            if total + size <= cache.limit:
                break
            if _remove(path):
                total -= status.st_size


def _remove(path: Path) -> bool:
    """Remove a file of the cache, unless it holds indexes that a process maps; return True if it is gone.

    Processes that map indexes hold a lock on them.
    """
    if path.parent.name != INDEX_FOLDER:
        path.unlink(missing_ok=True)
        return True
    with suppress(OSError):
        # Opened for writing, since network file systems give no exclusive lock otherwise.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
        finally:
            os.close(descriptor)
    return False


def acquire_lock(path: Path) -> int:
    """Open and exclusively lock a file, and return its descriptor. Raises OSError.

    The lock is held until the descriptor is closed or the process dies.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file. Raises a MegatfmError if its file system has no locks."""
    try:
        descriptor = acquire_lock(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise MegatfmError(
            f"{path}: its file system can't lock files ({error.strerror}), so processes would fetch over one another: "
            "choose a folder on a disk of this machine as data.cache_dir"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)
