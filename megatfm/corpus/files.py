"""Files of a corpus: read only if they are plain files, written only as a whole."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from blake3 import blake3

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import fsync_directory, name_write_errors, open_nofollow

RESTORE = "restore it from a copy, or delete the folder and write the corpus again with `megatfm prep`"
_TOO_MANY_OPEN_FILES = "raise the limit of open files, for example by `ulimit -n 65536`: the corpus is intact"
_NO_PERMISSION = "give this user the right to read it, for example by `chmod -R u+rX` on the folder"
_STORAGE_TROUBLE = "the disk or file server has trouble: try again later; if it persists, restore the file from a copy"
ADVICE = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _TOO_MANY_OPEN_FILES),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _NO_PERMISSION),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ETIMEDOUT), _STORAGE_TROUBLE),
    errno.ENOMEM: "the machine is out of memory: the corpus is intact",
}
"""Error number → advice, where the file is not at fault. Other errors mean that it is missing or damaged."""


def check_local(path: str | Path) -> None:
    """Raise a UsageError for a URL, even one that was made a Path: it would create a local folder named like `s3:`."""
    if match := re.match(r"([a-z][a-z0-9+.-]+):/", str(path)):
        raise UsageError(
            f"{path}: files are written to this machine, not to {match[1]}://: give a path here, and upload what is "
            "written"
        )


def get_regular_file_size(path: Path) -> int:
    """Return the size of a plain file in bytes. Raises a MegatfmError if it is missing, a link or a device."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise _make_unreadable_error(path, error, RESTORE) from error
    if not stat.S_ISREG(status.st_mode):
        raise MegatfmError(f"{path}: is a link or a special file, not a plain file: {RESTORE}")
    return status.st_size


def check_size(path: Path, size: int) -> None:
    """Raise a MegatfmError unless `path` is a plain file of `size` bytes."""
    actual = get_regular_file_size(path)
    if actual != size:
        raise MegatfmError(f"{path}: has {actual} bytes, its manifest says {size}: {RESTORE}")


def open_descriptor(path: Path, remedy: str = RESTORE) -> int:
    """Open a file for reading, unless it is a link. Raises a MegatfmError that ends with `remedy`."""
    try:
        # Without O_NONBLOCK opening a planted FIFO would wait for a writer indefinitely.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _make_unreadable_error(path, error, remedy) from error


def _make_unreadable_error(path: Path, error: OSError, remedy: str, location: str = "") -> MegatfmError:
    return MegatfmError(f"{path}: cannot be read{location} ({error.strerror}): {ADVICE.get(error.errno or 0, remedy)}")


def read_at(descriptor: int, path: Path, offset: int, size: int, remedy: str = RESTORE) -> bytes:
    """Return `size` bytes of an open file from `offset`.

    Raises a MegatfmError that ends with `remedy` if the file has fewer bytes or can't be read. A memory map is not
    used, since a process that reads one dies by a signal when another process truncates the file.
    """
    try:
        # pread returns at most about 2 GiB; every range of a corpus is smaller (see MAX_FRAME_BYTES).
        data = os.pread(descriptor, size, offset)
    except OSError as error:
        raise _make_unreadable_error(path, error, remedy, f" at byte {offset}") from error
    if len(data) != size:
        raise MegatfmError(f"{path}: ends at byte {offset + len(data)}, before {offset + size}: {remedy}")
    return data


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Read `size` bytes of a plain file from `offset`, as `read_at` does."""
    descriptor = open_descriptor(path)
    try:
        return read_at(descriptor, path, offset, size)
    finally:
        os.close(descriptor)


def open_regular_file(path: Path) -> IO[bytes]:
    """Open a plain file for reading. Raises a MegatfmError if it is missing, a link or a device."""
    get_regular_file_size(path)
    return os.fdopen(open_descriptor(path), "rb")


class AtomicFile:
    """A file that appears under its name only when it is complete and on disk.

    Until `commit` it is called `.NAME.partial`, in the same folder. A failed write (say, on a full disk) removes it
    and raises a MegatfmError; so does leaving a `with` block without `commit`. `size` and `blake3` describe the bytes
    written so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._partial = path.with_name(f".{path.name}.partial")
        self._hash = blake3()
        with name_write_errors(path):
            # commit or discard closes it
            self._file = open(self._partial, "wb", buffering=0, opener=open_nofollow)  # noqa: SIM115

    @property
    def blake3(self) -> str:
        """Hexadecimal hash of the bytes written so far."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append bytes. Raises a MegatfmError and removes the partial file if they can't be written."""
        with self._discard_on_error():
            unwritten = memoryview(data)
            while unwritten:  # an unbuffered write may take only a part
                unwritten = unwritten[self._file.write(unwritten) :]
        self._hash.update(data)
        self.size += len(data)

    def commit(self) -> None:
        """Sync the file, give it its final name, and sync the folder. Raises a MegatfmError as `write` does."""
        with self._discard_on_error():
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self.path)
            fsync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the partial file; does nothing after a commit."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        with name_write_errors(self.path):
            try:
                yield
            except OSError:
                self.discard()
                raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, and rename it to `path`.

    Every process uses the same temporary name, so that a later run overwrites what a killed one left.
    """
    with AtomicFile(path) as file:
        file.write(data)
        file.commit()
