"""Small files that are there whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, force it to the disk, and give it its name. Raises OSError.

    However the process ends, the name holds what it held before or all of `content`. Several processes may write the
    same file: the last one's stays. A link in the place of a draft is not followed.
    """
    draft = draft_of(path)
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk: a file's own fsync does not cover its name. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_of(path: Path) -> Path:
    """What this process calls a file until it is whole."""
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.partial")
