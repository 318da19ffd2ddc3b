"""Atomic writes of small files, files that grow, never through a planted link, what a refused run removes, and how many
may be open."""

import contextlib
import errno
import os
import resource
import secrets
import shutil
from dataclasses import dataclass, field
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


NEW_RUN_VARIABLE = "MEGATFM_NEW_RUN"
"""Environment variable with the run directory that a launcher has just created for its ranks."""


@dataclass
class NewPaths:
    """Paths that a command makes where nothing was before, and removes again if what they were for is refused.

    folders: nested ones, the outermost first, removed if they are empty then. trees: removed with all they hold.
    """

    folders: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, noting the ones that were not there. Raises OSError."""
        self.will_make_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)

    def will_make_folder(self, folder: Path) -> None:
        """Note a folder and those above it that are about to be made."""
        folder = folder.absolute()
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        self.folders += [path for path in reversed(missing) if path not in self.folders]

    def will_write(self, path: Path) -> None:
        """Note a file that is about to be written, if it is new."""
        path = path.absolute()
        if not os.path.lexists(path) and path not in self.files:
            self.files.append(path)

    def is_new(self, folder: Path) -> bool:
        """Return whether a folder is one of those that were made."""
        return folder.absolute() in self.folders

    def keep(self) -> None:
        """Forget all paths, so that none is removed."""
        for paths in (self.folders, self.files, self.trees):
            paths.clear()

    def remove_files(self) -> None:
        """Remove the files and trees, the last one first. One that can't be removed stays, with those before it."""
        with contextlib.suppress(OSError):
            for path in reversed(self.files):
                path.unlink(missing_ok=True)
            for tree in self.trees:
                shutil.rmtree(tree, ignore_errors=True)

    def remove_folders(self) -> None:
        """Remove the folders that are empty."""
        with contextlib.suppress(OSError):
            for folder in reversed(self.folders):
                if folder.exists():
                    folder.rmdir()

    def remove(self) -> None:
        """Remove everything that is noted here."""
        self.remove_files()
        self.remove_folders()

    def holds_all_of(self, folder: Path) -> bool:
        """Return whether every file in a folder is noted here."""
        paths = (path for path in folder.absolute().rglob("*") if path.is_symlink() or not path.is_dir())
        return all(path in self.files or any(tree in path.parents for tree in self.trees) for path in paths)


SPARE_DESCRIPTORS = 256
"""For what a process opens besides: files of tensors and logs, libraries, workers' pipes."""


def raise_descriptor_limit(needed: int) -> int:
    """Raise this process's soft limit of open files and sockets so that it can open `needed` more, and some spare.

    Returns by how many the hard limit, which only the machine's administrator can raise, falls short.
    """
    try:
        n_open = len(list(Path("/proc/self/fd").iterdir()))
    except OSError:  # not on Linux
        n_open = SPARE_DESCRIPTORS
    total = n_open + needed + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= total:
        return 0
    limit = total if hard == resource.RLIM_INFINITY else min(total, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return total - limit
