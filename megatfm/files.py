"""Atomic writes of small files, and files that grow, never through a planted link."""

import contextlib
import errno
import os
import secrets
from pathlib import Path


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, force it to the disk, and give it its name. Raises OSError.

    However the process ends, the name holds what it held before or all of `content`. Several processes may write the
    same file: the last one's stays. A link in the place of a draft is not followed.
    """
    draft = temporary_path(path)
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    fsync_directory(path.parent)


def open_nofollow(path: str, flags: int) -> int:
    """For `open(path, "ab", opener=open_nofollow)`: a symbolic link in the file's place is refused.

    Raises OSError.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = "it is a symbolic link, and what it points to would be written to: remove it"
        raise OSError(errno.ELOOP, reason, path) from None


def fsync_directory(folder: Path) -> None:
    """Force the names in a folder to the disk: a file's own fsync does not cover its name. Raises OSError.

    Does nothing on file systems that know no fsync of folders, where the names are as safe as they get.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """Return a name for a file until it is complete, which no other process takes: containers may share host and
    process id."""
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}.partial")
