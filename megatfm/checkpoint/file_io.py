"""All operations by which checkpoints touch the disk: durable, and with errors that name the file."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from megatfm import files
from megatfm.checkpoint import chunked_io
from megatfm.errors import MegatfmError

# Opening must neither follow a planted link nor wait for the other end of a planted pipe.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

MAX_METADATA_BYTES = 2**34
"""Most bytes of a file that is read at once, as metadata are; a planted file may claim any."""
NFS_VISIBILITY_SECONDS = 10.0
"""How long a shared filesystem (NFS, Lustre) may take to show one machine the files of another."""


@contextmanager
def naming(verb: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the body into one line that says what could not be done, to which file, and why."""
    try:
        yield
    except OSError as error:
        raise MegatfmError(f"cannot {verb} {path}: {error.strerror or error}") from error


def make_durable_dirs(path: Path) -> None:
    """Create a folder and its missing parents; each new name is on disk when this returns."""
    if path.is_dir():
        return
    make_durable_dirs(path.parent)
    with naming("create", path):
        path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def make_dir(path: Path) -> None:
    """Create a folder that must not exist. Its name is not on disk yet: drafts needn't survive a crash."""
    with naming("create", path):
        path.mkdir()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: fsync of a file does not cover its name."""
    with naming("sync", path):
        files.fsync_directory(path)


def write_file(path: Path, parts: Iterable[memoryview], direct: bool = False) -> tuple[int, str]:
    """Write a new file and fsync it; return its bytes and the BLAKE3 of the written data.

    The hash is taken from memory on the way, so that a disk that garbles the bytes can't vouch for itself. direct:
    past the page cache where the filesystem can, which is faster for large files and takes no memory from others.
    """
    size = 0
    with naming("write", path), chunked_io.ThreadedBlake3() as digest:
        fd = _create(path, direct)
        try:
            out = (
                chunked_io.DirectFileWriter(fd)
                if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
                else chunked_io.FileWriter(fd)
            )
            for part in parts:
                for start in range(0, part.nbytes, chunked_io.CHUNK_BYTES):
                    chunk = part[start : start + chunked_io.CHUNK_BYTES]
                    digest.update(chunk)
                    size += chunk.nbytes
                    out.write(chunk)
            out.flush()
            os.fsync(fd)
        finally:
            os.close(fd)
        return size, digest.hexdigest()


def _create(path: Path, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):  # some filesystems make it before they refuse
                path.unlink()
    return os.open(path, flags, 0o666)


def read_file(path: Path) -> bytes:
    """Read a regular file whole. A link, a pipe, a missing, unreadable or huge file is refused by name."""
    with HashedFile(path) as file:
        if file.size > MAX_METADATA_BYTES:
            raise MegatfmError(f"cannot read {path}: {file.size} bytes are more than such a file ever has")
        return bytes(file.read(file.size))


class HashedFile:
    """A regular file that is read from its start to its end, hashed on the way; the target buffers must not change
    until `hexdigest`. A link, a pipe, a missing or an unreadable file is refused by name. direct: see
    `chunked_io.open_reader`."""

    def __init__(self, path: Path, direct: bool = False) -> None:
        self._path, self._hash = path, chunked_io.ThreadedBlake3()
        self._spare: list[memoryview] = []
        with naming("read", path):
            self._file = os.open(path, _READ_FLAGS)
        try:
            with naming("read", path):
                self.size = self.remaining = _regular_size(path, os.fstat(self._file))
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the readahead
                self._source = chunked_io.open_reader(self._file, self.size, direct)
        except MegatfmError:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back; its hash may be half done."""
        self._hash.hexdigest()
        self._source.close()
        os.close(self._file)

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes, of which there must be enough."""
        n_read = 0
        with naming("read", self._path):
            while n_read < target.nbytes:
                n_bytes = self._source.read_into(target[n_read:])
                if not n_bytes:
                    at = self.size - self.remaining + n_read
                    raise MegatfmError(f"cannot read {self._path}: it shrank to {at} bytes while it was read")
                self._hash.update(target[n_read : n_read + n_bytes])
                n_read += n_bytes
        self.remaining -= n_read

    def read(self, size: int) -> memoryview:
        """The next bytes, in memory of their own."""
        content = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
        self.read_into(content)
        return content

    def skip(self, size: int) -> None:
        """Hash the next bytes only."""
        while size > 0:
            # As many buffers as the hash may lag behind: fresh memory costs more than reading does.
            chunk = (
                self._spare.pop(0)
                if len(self._spare) > chunked_io.MAX_QUEUED_CHUNKS + 1
                else memoryview(bytearray(chunked_io.CHUNK_BYTES))
            )
            self._spare.append(chunk)
            self.read_into(chunk[: min(size, chunked_io.CHUNK_BYTES)])
            size -= chunked_io.CHUNK_BYTES

    def hexdigest(self) -> str:
        """The BLAKE3 of the whole file, the rest of which is skipped."""
        self.skip(self.remaining)
        return self._hash.hexdigest()


def file_size(path: Path) -> int:
    """Return the bytes of a regular file; anything else is refused by name."""
    with naming("read", path):
        return _regular_size(path, os.lstat(path))


def drop_page_cache(path: Path) -> None:
    """Drop a file's pages from memory, so that reading it asks the disk. Unsynced files stay."""
    with naming("read", path):
        fd = os.open(path, _READ_FLAGS)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def wait_until_visible(path: Path, deadline: float) -> None:
    """Wait until what another machine has made can be seen here, at most to `deadline` (of time.monotonic).

    Returns silently at the deadline: the caller's own access then raises the error.
    """
    while True:
        try:
            os.lstat(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > deadline:
                return
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208  asks an NFS client to look again
        time.sleep(0.05)


def wait_until_size(path: Path, size: int, deadline: float) -> None:
    """Wait until a file has its size, at most to `deadline`: an NFS client may show an earlier one for a while."""
    wait_until_visible(path, deadline)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return
            with contextlib.suppress(OSError):  # opening asks the server
                os.close(os.open(path, _READ_FLAGS))
            if os.lstat(path).st_size == size:
                return
        time.sleep(0.05)


def _regular_size(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise MegatfmError(f"cannot read {path}: it is not a regular file")
    return status.st_size


def rename(old: Path, new: Path) -> None:
    """Rename a folder atomically, and durably once this returns. `new` must not exist, or be empty."""
    with naming("rename", old):
        old.rename(new)
    sync_folder(new.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents (links are removed, not followed)."""
    with naming("remove", path):
        shutil.rmtree(path)
