"""Every operation by which the store touches the disk: few, durable, and with errors that name the file."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from megatfm.errors import MegatfmError

# Opening must neither follow a planted link nor wait for the other end of a planted pipe.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def naming(verb: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the body into one line that says what could not be done, to which file, and why."""
    try:
        yield
    except OSError as error:
        raise MegatfmError(f"cannot {verb} {path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents; each new name is on disk when this returns."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with naming("create", path):
        path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: fsync of a file does not cover its name."""
    with naming("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_file(path: Path, parts: Iterable[memoryview]) -> tuple[int, str]:
    """Write a new file and fsync it; return its bytes and the BLAKE3 of what was handed to the disk.

    The hash is taken from memory on the way, so that a disk that garbles the bytes can't vouch for itself.
    """
    digest = blake3()
    size = 0
    with naming("write", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                digest.update(part)
                size += part.nbytes
                while part.nbytes:
                    part = part[os.write(fd, part) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    return size, digest.hexdigest()


def read_file(path: Path) -> bytearray:
    """Read a regular file whole. A link, a pipe, a missing or an unreadable file is refused by name."""
    with naming("read", path):
        fd = os.open(path, _READ_FLAGS)
        try:
            size = _regular_size(path, os.fstat(fd))
            content = bytearray(size)
            view = memoryview(content)
            done = 0
            while done < size and (got := os.readv(fd, [view[done : done + 2**30]])):
                done += got
        finally:
            os.close(fd)
    if done < size:
        raise MegatfmError(f"cannot read {path}: it shrank to {done} bytes while it was read")
    return content


def file_size(path: Path) -> int:
    """Return the bytes of a regular file; anything else is refused by name."""
    with naming("read", path):
        return _regular_size(path, os.lstat(path))


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
    """Remove a folder with all that is in it (links are removed, not followed)."""
    with naming("remove", path):
        shutil.rmtree(path)
