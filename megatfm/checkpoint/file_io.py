"""Durable file operations for checkpoints, with errors that name the file."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np

from megatfm.checkpoint import chunked_io
from megatfm.errors import MegatfmError
from megatfm.files import fsync_directory, name_disk_errors

# Opening must neither follow a planted link nor wait for the other end of a planted pipe.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

MAX_METADATA_BYTES = 2**34
"""Size limit of metadata, which is read at once: a planted file may have any size."""
NFS_VISIBILITY_SECONDS = 10.0
"""How long a shared filesystem (NFS, Lustre) may take to show one machine the files of another."""


def make_durable_dirs(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    if path.is_dir():
        return
    make_durable_dirs(path.parent)
    with name_disk_errors("create", path):
        path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def make_dir(path: Path) -> None:
    """Create a folder that must not exist. Not durable: a staging folder needn't survive a crash."""
    with name_disk_errors("create", path):
        path.mkdir()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; fsync of a file doesn't cover its name."""
    with name_disk_errors("sync", path):
        fsync_directory(path)


def write_file(path: Path, buffers: Iterable[memoryview], direct: bool = False) -> tuple[int, str]:
    """Write a new file and fsync it; return its size in bytes and the BLAKE3 of the data.

    The hash is computed from memory, so that a later check also finds errors of the disk. direct: use O_DIRECT if the
    filesystem can, which is faster for large files and leaves the page cache to others.
    """
    size = 0
    with name_disk_errors("write", path), chunked_io.ThreadedBlake3() as digest:
        fd = _create(path, direct)
        try:
            is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            out = chunked_io.DirectFileWriter(fd) if is_direct else chunked_io.FileWriter(fd)
            for buffer in buffers:
                for start in range(0, buffer.nbytes, chunked_io.CHUNK_BYTES):
                    chunk = buffer[start : start + chunked_io.CHUNK_BYTES]
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
            path.unlink(missing_ok=True)  # some filesystems create the file before they refuse
    return os.open(path, flags, 0o666)


def read_file(path: Path) -> bytes:
    """Read a full regular file. Raises MegatfmError for a link, a pipe, a missing, unreadable or huge file."""
    with HashedFile(path) as file:
        if file.size > MAX_METADATA_BYTES:
            raise MegatfmError(f"can't read {path}: {file.size} bytes are more than such a file ever has")
        return bytes(file.read(file.size))


class HashedFile:
    """A regular file that is hashed while it is read sequentially.

    Target buffers must not change until `hexdigest`. direct: see `chunked_io.open_reader`. Raises MegatfmError for a
    link, a pipe, a missing or an unreadable file.
    """

    def __init__(self, path: Path, direct: bool = False) -> None:
        self._path, self._hash = path, chunked_io.ThreadedBlake3()
        self._spare: list[memoryview] = []
        with name_disk_errors("read", path):
            self._file = os.open(path, _READ_FLAGS)
        try:
            with name_disk_errors("read", path):
                self.size = self.remaining = _get_regular_size(path, os.fstat(self._file))
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the readahead
                self._source = chunked_io.open_reader(self._file, self.size, direct)
        except MegatfmError:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, also before its end."""
        self._hash.hexdigest()
        self._source.close()
        os.close(self._file)

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. Raises MegatfmError if the file ends before."""
        n_read = 0
        with name_disk_errors("read", self._path):
            while n_read < target.nbytes:
                n_bytes = self._source.read_into(target[n_read:])
                if not n_bytes:
                    size = self.size - self.remaining + n_read
                    raise MegatfmError(f"can't read {self._path}: it shrank to {size} bytes while it was read")
                self._hash.update(target[n_read : n_read + n_bytes])
                n_read += n_bytes
        self.remaining -= n_read

    def read(self, size: int) -> memoryview:
        """Read the next `size` bytes into new memory."""
        content = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
        self.read_into(content)
        return content

    def skip(self, size: int) -> None:
        """Hash the next `size` bytes without returning them."""
        while size > 0:
            # Reuse buffers once the hash is done with them: allocating memory costs more than reading.
            if len(self._spare) > chunked_io.MAX_QUEUED_CHUNKS + 1:
                chunk = self._spare.pop(0)
            else:
                chunk = memoryview(bytearray(chunked_io.CHUNK_BYTES))
            self._spare.append(chunk)
            self.read_into(chunk[: min(size, chunked_io.CHUNK_BYTES)])
            size -= chunked_io.CHUNK_BYTES

    def hexdigest(self) -> str:
        """Read to the end and return the BLAKE3 of the full file."""
        self.skip(self.remaining)
        return self._hash.hexdigest()


def get_file_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises MegatfmError for anything else."""
    with name_disk_errors("read", path):
        return _get_regular_size(path, os.lstat(path))


def drop_page_cache(path: Path) -> None:
    """Drop a file from the page cache, so that reads come from the disk. Unsynced pages stay."""
    with name_disk_errors("read", path):
        fd = os.open(path, _READ_FLAGS)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def wait_until_visible(path: Path, deadline: float) -> None:
    """Wait until a path created by another machine is visible here, at most until `deadline` (time.monotonic).

    Returns silently at the deadline; the caller's access then raises the error.
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
    """Wait until a file has its size, at most until `deadline`: an NFS client may show an old size for a while."""
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


def _get_regular_size(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise MegatfmError(f"can't read {path}: it is not a regular file")
    return status.st_size


def rename(old: Path, new: Path) -> None:
    """Rename a folder atomically and durably. `new` must not exist, or be empty."""
    with name_disk_errors("rename", old):
        old.rename(new)
    sync_folder(new.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents (links are removed, not followed)."""
    with name_disk_errors("remove", path):
        shutil.rmtree(path)


def remove_unfinished(folder: Path, error: BaseException) -> None:
    """Remove the folder of an action that failed, if it exists; a second error becomes a note of the first."""
    try:
        if folder.exists():
            remove_tree(folder)
    except MegatfmError as second_error:
        error.add_note(f"{folder} is left over: {second_error}")
