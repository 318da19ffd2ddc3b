"""Files: atomic writes, locks, strict JSON, hashes, opening without following links, errors of the disk, descriptors,
and removal of a refused run's files."""

import contextlib
import errno
import fcntl
import json
import math
import os
import resource
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from megatfm.errors import MegatfmError

LOCK_POLL_SECONDS = 0.02
"""Interval at which `lock_path` asks for a lock that another process holds."""


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a temporary file beside `path`, sync it to disk, and rename it to `path`. Raises OSError that names `path`.

    However the process ends, `path` has its old content or all of the new one. If several processes write the same
    file, the last one wins. Links in place of the temporary file are not followed.
    """
    temporary = temporary_path(path)
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    fsync_directory(path.parent)


def to_strict_json(value: Any, **options: Any) -> str:
    """Return strict JSON. NaN and infinities, which JSON lacks, become strings that `float` can read.

    options: of `json.dumps`.
    """
    return json.dumps(replace_non_finite(value), allow_nan=False, **options)


def replace_non_finite(value: Any) -> Any:
    """Return nested values with "NaN", "Infinity" and "-Infinity" in place of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return value


def hash_content(file: IO[bytes]) -> str:
    """Return the BLAKE3 hash, in hexadecimal, of an open file from its position to its end. Raises OSError."""
    digest = blake3()
    while data := file.read(2**20):
        digest.update(data)
    return digest.hexdigest()


def open_nofollow(path: str, flags: int) -> int:
    """Open a file, but refuse a symbolic link; for `open(path, "ab", opener=open_nofollow)`. Raises OSError."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = "it is a symbolic link, whose target would be overwritten: remove it"
        raise OSError(errno.ELOOP, reason, path) from None


def fsync_directory(folder: Path) -> None:
    """Sync a folder's entries to disk, since a file's own fsync doesn't cover its name. Raises OSError.

    Does nothing on file systems that don't support this.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock_path(path: Path, timeout: float = math.inf) -> Iterator[None]:
    """Let one process at a time into the block, by a lock file beside `path`, which is removed at the end.

    A lock ends with its process. After `timeout` seconds, and on file systems without locks, the block runs unlocked.
    """
    lock, deadline = path.with_name(f".{path.name}.lock"), time.monotonic() + timeout
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = _open_locked(lock, deadline)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                lock.unlink()
            os.close(descriptor)


def _open_locked(lock: Path, deadline: float) -> int:
    """Open and lock a lock file; return its descriptor. Raises OSError after the deadline, or if it can't be locked."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _wait_for_flock(descriptor, deadline)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last holder removed the file before it was locked here


def _wait_for_flock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_POLL_SECONDS)


def is_copied_record(record: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a record in `folder` names another folder, as its `run`, that still exists: it was copied here.

    Devices aren't compared, since a folder of a file server may be mounted twice.
    """
    origin = record.get("run")
    if not isinstance(origin, str) or origin == str(folder):
        return False
    try:
        return Path(origin).stat().st_ino != folder.stat().st_ino
    except (OSError, ValueError):  # the folder was moved here
        return False


def temporary_path(path: Path) -> Path:
    """Return a unique name for a file until it is complete. It is partly random: containers may share host name and
    process id."""
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}.partial")


NEW_RUN_VARIABLE = "MEGATFM_NEW_RUN"
"""Environment variable with the run directory that a launcher has just created for its ranks."""


@dataclass
class NewPaths:
    """Paths that a command creates for a run, and removes if the run is refused.

    folders: removed if empty; outermost first. trees: folders that are removed with their contents. replaced: content
    of files that existed before, which is restored.
    """

    folders: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    replaced: dict[Path, bytes] = field(default_factory=dict)

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its missing parents, and register the new ones. Raises OSError."""
        self.will_make_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)

    def will_make_folder(self, folder: Path) -> None:
        """Register a folder and its parents, as far as they don't exist yet."""
        folder = folder.absolute()
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        self.folders += [path for path in reversed(missing) if path not in self.folders]

    def will_write(self, path: Path) -> None:
        """Register a file that is about to be written, unless it exists already."""
        path = path.absolute()
        if not os.path.lexists(path) and path not in self.files:
            self.files.append(path)

    def will_replace(self, path: Path) -> None:
        """Register a small file that is about to be written, and its content if it exists already."""
        if path.is_file():
            self.replaced.setdefault(path.absolute(), path.read_bytes())
        self.will_write(path)

    def is_new(self, folder: Path) -> bool:
        """Return whether a folder is one of those registered as new."""
        return folder.absolute() in self.folders

    def keep(self) -> None:
        """Forget all paths, so that nothing is removed."""
        for paths in (self.folders, self.files, self.trees, self.replaced):
            paths.clear()

    def remove_files(self) -> None:
        """Remove files, last registered first, and trees; restore replaced files. Stops where one can't be removed."""
        self.restore()
        with contextlib.suppress(OSError):
            for path in reversed(self.files):
                path.unlink(missing_ok=True)
            for tree in self.trees:
                shutil.rmtree(tree, ignore_errors=True)

    def restore(self) -> None:
        """Write the former content of replaced files."""
        with contextlib.suppress(OSError):
            for path, content in self.replaced.items():
                atomic_write(path, content)

    def remove_folders(self) -> None:
        """Remove the folders that are empty."""
        with contextlib.suppress(OSError):
            for folder in reversed(self.folders):
                if folder.exists():
                    folder.rmdir()

    def remove(self) -> None:
        """Remove all registered files and trees, and the folders that are then empty."""
        self.remove_files()
        self.remove_folders()

    def holds_all_of(self, folder: Path) -> bool:
        """Return whether every file in a folder is registered here."""
        paths = (path for path in folder.absolute().rglob("*") if path.is_symlink() or not path.is_dir())
        return all(path in self.files or any(tree in path.parents for tree in self.trees) for path in paths)


SPARE_DESCRIPTORS = 256
"""Descriptors for everything else that a process opens: files of tensors and logs, libraries, workers' pipes."""


def raise_descriptor_limit(needed: int) -> int:
    """Raise this process's soft limit of descriptors so that it can open `needed` more files and sockets.

    Returns the number of descriptors by which the hard limit, which only an administrator can raise, is too low.
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


@contextlib.contextmanager
def name_disk_errors(verb: str, path: Path, way_out: str = "") -> Iterator[None]:
    """Turn an OSError into a MegatfmError: "can't write PATH: No space left on device: make room". verb: "write"."""
    try:
        yield
    except OSError as error:
        ending = f": {way_out}" if way_out else ""
        raise MegatfmError(f"can't {verb} {path}: {error.strerror or error}{ending}") from error


def name_write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError into a MegatfmError that says `path` can't be written, and the way out."""
    return name_disk_errors("write", path, "make room or choose another folder, and run again")
