"""Storage of a corpus's files: a folder, or a URL with a cache on this machine."""

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
from megatfm.corpus.remote import CHUNK, DiskError, download_rest, with_retries
from megatfm.errors import MegatfmError, UsageError

MAX_MANIFEST_BYTES = 2**30
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
INDEXES = "indexes"
"""Folder of the cache for indexes that processes share."""


class ManifestFile(Protocol):
    """A manifest's entry of a file."""

    @property
    def file(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def blake3(self) -> str: ...


class ShardStorage(Protocol):
    """Reads the files of one corpus. `folder` is where they lie, or are kept while they are used."""

    @property
    def folder(self) -> Path: ...

    @property
    def remedy(self) -> str:
        """Advice about a damaged file, for the end of an error."""
        ...

    def path(self, entry: ManifestFile) -> Path:
        """Return where a file lies, or will lie when it was fetched."""
        ...

    def check(self, entry: ManifestFile) -> None:
        """Raise a MegatfmError unless the file is there in its size, as far as that is known without fetching it."""
        ...

    def read(self, entry: ManifestFile, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; a MegatfmError that names the file if that fails."""
        ...

    def open(self, entry: ManifestFile) -> int:
        """A descriptor for more than one reading of a file."""
        ...


@dataclass(frozen=True)
class LocalStorage:
    """A folder."""

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
    """A folder for files from URLs, shared by all processes of a machine, and the bytes that it may hold."""

    folder: Path = Path("~/.cache/megatfm/shards")
    limit: int = 2**36


@dataclass(frozen=True)
class CachedRemoteStorage:
    """A URL that fsspec can read. A file is fetched as a whole when it is first read, by one process of a machine while
    the others wait; it gets its name only when its BLAKE3 hash is the manifest's. The name begins with that hash, so a
    corpus that replaces another behind the same URL finds none of the other's files. Above the cache's limit, files
    that were not read for longest go; one that is needed again is fetched again.
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
        for last in (False, False, True):
            if not _has_expected_size(path, entry):
                self._fetch(path, entry)
            try:
                descriptor = open_descriptor(path, self.remedy)
            except MegatfmError:
                if last or path.exists():  # else another process needed its room in between
                    raise
            else:
                with suppress(OSError):
                    os.utime(path)
                return descriptor
        raise AssertionError

    def manifest(self, name: str) -> bytes:
        """The manifest's bytes, which are never kept."""
        return with_retries(self.url, name, lambda fs, root: _read_manifest_bytes(fs, f"{root}/{name}"))

    def _fetch(self, path: Path, entry: ManifestFile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_name(f".{path.name}.lock")):
                if not _has_expected_size(path, entry):  # by another process, while this one waited
                    make_room(self.cache, entry.bytes)
                    self._download(path, entry)
        except OSError as error:
            raise MegatfmError(
                f"{path}: cannot be written ({error.strerror}): make room, or choose another folder as data.cache_dir"
            ) from error

    def _download(self, path: Path, entry: ManifestFile) -> None:
        partial = path.with_name(
            f".{path.name}.partial"
        )  # named by its content, so that a killed download's goes on
        try:
            for _ in range(2 + partial.exists()):
                download_rest(self.url, entry.file, partial, entry.bytes)
                arrived = _hash_and_sync(partial)
                if arrived == entry.blake3:
                    partial.replace(path)
                    return
                partial.unlink()
            raise MegatfmError(
                f"{self.url}/{entry.file}: what arrives is not what the manifest says ({arrived[:16]}, not "
                f"{entry.blake3[:16]} of {entry.bytes} bytes): upload the corpus again"
            )
        except DiskError as error:
            raise error.cause from error
        finally:
            partial.unlink(missing_ok=True)


def open_storage(place: str | Path, cache: ShardCacheConfig) -> LocalStorage | CachedRemoteStorage:
    """The store of a folder or URL. Raises UsageError for anything else."""
    if "://" in str(place):
        return CachedRemoteStorage(str(place).rstrip("/"), cache)
    if re.match(r"[a-z]+:", str(place)):
        raise UsageError(
            f"{place}: is neither a folder nor a URL that can be read: a corpus has no commands to run"
        )
    return LocalStorage(Path(place))


def _hash_and_sync(path: Path) -> str:
    """Force a file to the disk, and return its BLAKE3 hash. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        fingerprint = blake3()
        while chunk := file.read(CHUNK):
            fingerprint.update(chunk)
        return fingerprint.hexdigest()


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
    """Remove files of the cache that were not used for longest, until `size` more bytes fit; none that is mapped."""
    root = cache.folder.expanduser()
    with _locked(root / ".lock"):
        files = [(path.stat(), path) for path in root.glob("*/[!.]*") if path.is_file()]
        files.sort(key=lambda file: file[0].st_mtime)
        total = sum(status.st_size for status, _ in files)
        for status, path in files:
            if total + size <= cache.limit:
                break
            if _remove(path):
                total -= status.st_size


def _remove(path: Path) -> bool:
    """Remove a file of the cache, but no indexes that a process maps: it holds a lock on them. Return whether it is
    gone."""
    if path.parent.name != INDEXES:
        path.unlink(missing_ok=True)
        return True
    with suppress(OSError):
        # For writing, without which network file systems give no exclusive lock.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
        finally:
            os.close(descriptor)
    return False


def acquire_lock(path: Path) -> int:
    """Open and lock a file, for one process at a time, until the descriptor is closed or the process dies. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. A MegatfmError where a file system can't lock."""
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
