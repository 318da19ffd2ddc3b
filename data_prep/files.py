"""Find the text files of a corpus, in an order that depends on their names alone."""

import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3

from megatfm.config.prep import ReadConfig
from megatfm.errors import MegatfmError, UsageError

# Of the standard library: no tests, and no other people's packages, which live in the same folder.
STDLIB_INCLUDE = ("*.py",)
_OF_IMAGES = ("jpg", "jpeg", "png", "cls", "json", "txt", "tar", "tgz", "tar.gz", "tar.zst")
USUAL_INCLUDE = {
    "megatron": ("*.bin",),  # each has its index beside it
    "images": tuple(f"*.{spelled}" for each in _OF_IMAGES for spelled in (each, each.upper())),
}
# What Hugging Face `datasets` puts beside the data: descriptions, and results that it keeps to save time.
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json", "cache-*.arrow")
STDLIB_EXCLUDE = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class TextFile:
    """A file to read: its path, its name below the corpus folder, its size in bytes, when it was last changed."""

    path: Path
    name: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class BadFile:
    """A file that can't be used, and why."""

    path: Path
    reason: str


OnBad = Callable[[Path, str], None]


class Listing:
    """The files of a corpus folder, and what was left out: by name, or because it is no usable file."""

    def __init__(self, config: ReadConfig) -> None:
        self.config = config
        self.root = _root(config)
        stdlib = config.folder is None
        usual = STDLIB_INCLUDE if stdlib else USUAL_INCLUDE.get(config.format or "", ("*",))
        self._include = config.include or usual
        self._exclude = (*config.exclude, *(STDLIB_EXCLUDE if stdlib else ()))
        self._skip_bad = config.on_bad == "skip"
        self.left_out = 0
        self.bad: list[BadFile] = []
        self.files = list(self._walk())
        if not self.files and not self.bad:
            raise UsageError(
                f"{self.root}: no text files here ({self.left_out} left out by name): set read.folder to a folder "
                "that has some, or change read.include and read.exclude"
            )

    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and times: another one means that the corpus has changed."""
        facts = [[file.name, file.size, file.modified_ns] for file in self.files]
        return blake3(json.dumps(facts).encode()).hexdigest()

    def on_bad(self, path: Path, reason: str) -> None:
        """Note a file that can't be used; a MegatfmError unless such files are to be skipped."""
        if not self._skip_bad:
            raise MegatfmError(
                f"{path}: {reason}; mend it, or skip and list all such files: read.on_bad=skip"
            )
        self.bad.append(BadFile(path, reason))

    def _walk(self) -> Iterator[TextFile]:
        """Depth first, sorted by name. Links are followed; one that leads back to a folder above is bad."""
        stack = [(self._entries(self.root), _identity(self.root))]
        while stack:
            path = next(stack[-1][0], None)
            if path is None:
                stack.pop()
                continue
            try:
                found = path.stat()
            except OSError as error:
                self.on_bad(path, f"can't be read ({error.strerror})")
                continue
            if stat.S_ISDIR(found.st_mode):
                identity = (found.st_dev, found.st_ino)
                if identity in [above for _, above in stack]:
                    self.on_bad(path, "is a link that leads back to a folder above it")
                else:
                    stack.append((self._entries(path), identity))
            elif not any(fnmatchcase(path.name, pattern) for pattern in self._include):
                self.left_out += 1
            elif stat.S_ISREG(found.st_mode):
                yield TextFile(path, _name(path.relative_to(self.root)), found.st_size, found.st_mtime_ns)
            else:
                self.on_bad(path, "is not a file but a device, pipe or socket")

    def _entries(self, folder: Path) -> Iterator[Path]:
        try:
            paths = sorted(folder.iterdir(), key=os.fsencode)
        except OSError as error:
            self.on_bad(folder, f"can't list this folder ({error.strerror})")
            return
        of_datasets = any(path.suffix == ".arrow" or path.name == "dataset_dict.json" for path in paths)
        exclude = (*self._exclude, *(_OF_DATASETS if of_datasets else ()))
        for path in paths:
            if path.name.startswith(".") or any(fnmatchcase(path.name, pattern) for pattern in exclude):
                self.left_out += 1
            else:
                yield path


def runs(sizes: Sequence[int], part_bytes: int) -> list[tuple[int, int]]:
    """Cut a list of files into runs of about `part_bytes`: (first, end) of each, at least one."""
    ends, size = [], 0
    for index, each in enumerate(sizes):
        if size >= part_bytes:
            ends.append(index)
            size = 0
        size += each
    ends.append(len(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _root(config: ReadConfig) -> Path:
    root = Path(config.folder if config.folder is not None else sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UsageError(f"{root}: no such folder: set read.folder to a folder of text files")
    if not root.is_dir():
        raise UsageError(f"{root}: is a file, not a folder: set read.folder to the folder that holds it")
    return root


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _name(relative: Path) -> str:
    """The path with `/`; names that aren't UTF-8 are spelled with escapes, `#` (our mark for parts) as %23."""
    return os.fsencode(relative).decode("utf-8", "backslashreplace").replace("#", "%23")
