"""Input files of a corpus folder or URL, in an order that depends on their names alone, and their documents."""

import json
import os
import shutil
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3

from megatfm.config.prep import ReadConfig
from megatfm.corpus.remote import RemoteFile, RemoteFolder
from megatfm.data_prep.documents import Document, StepStats, to_drop_reason
from megatfm.data_prep.readers import find_format, get_reader
from megatfm.data_prep.readers.record import BadFileError, BadRecord, replace_surrogates
from megatfm.data_prep.readers.text import cut_text, read_text
from megatfm.errors import MegatfmError, UsageError
from megatfm.terminal import format_counted

# The standard library, without tests and without installed packages, which lie in the same folder.
STDLIB_INCLUDE = ("*.py",)
_IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "cls", "json", "txt", "tar", "tgz", "tar.gz", "tar.zst")
USUAL_INCLUDE = {
    "megatron": ("*.bin",),  # each has its index beside it
    "images": tuple(f"*.{spelling}" for extension in _IMAGE_EXTENSIONS for spelling in (extension, extension.upper())),
}
_COMPANIONS = {"megatron": ("*.idx",)}
"""Patterns of files that are read with another: not counted as left out."""
MAX_EXAMPLES = 3
# Files that Hugging Face `datasets` puts beside the data: descriptions and caches.
_DATASETS_FILES = ("dataset_info.json", "dataset_dict.json", "state.json", "cache-*.arrow")
STDLIB_EXCLUDE = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class InputFile:
    """A file to read: path or URL, name below the corpus folder, size in bytes, and version (mtime in ns, or the
    store's)."""

    path: str
    name: str
    size: int
    version: int | str


@dataclass(frozen=True)
class BadFile:
    """A file that can't be used, and why."""

    where: str
    reason: str


class InputFiles:
    """The files of a corpus folder, the number excluded by name, and the unusable ones.

    A file behind a URL is fetched to `scratch` when it is read, and removed afterwards.
    """

    def __init__(self, config: ReadConfig, scratch: Path | None = None) -> None:
        self.config = config
        self._remote = RemoteFolder(config.folder.rstrip("/")) if config.folder and "://" in config.folder else None
        self._remote_files: dict[str, RemoteFile] = {}
        self._scratch = scratch
        self.root = config.folder if self._remote else _find_root(config)
        is_stdlib = config.folder is None
        default_include = STDLIB_INCLUDE if is_stdlib else USUAL_INCLUDE.get(config.format or "", ("*",))
        self._include = config.include or default_include
        self._companions = _COMPANIONS.get(config.format or "", ())
        self._exclude = (*config.exclude, *(STDLIB_EXCLUDE if is_stdlib else ()))
        self._skip_bad = config.on_error == "skip"
        self.n_excluded = 0
        self._excluded_examples: list[str] = []
        self.bad: list[BadFile] = []
        self.folders: list[str] = []
        """Names of local folders below the corpus folder, those without files included."""
        self.files = list(self._walk_remote(self._remote) if self._remote else self._walk(Path(str(self.root))))
        if not self.files and not self.bad:
            kind = "images, and no tars of them," if config.format == "images" else "text files"
            raise UsageError(
                f"{self.root}: no {kind} here ({self.n_excluded} left out by name): set read.folder to a folder "
                "that has some, or change read.include and read.exclude"
            )

    @property
    def notes(self) -> list[str]:
        """Notes for the log on files that were left out."""
        if not self.n_excluded:
            return []
        examples = ", ".join(self._excluded_examples) + ", …" * (self.n_excluded > MAX_EXAMPLES)
        counted = format_counted(self.n_excluded, "file or folder", "files or folders")
        return [f"left out by name: {counted} ({examples})"]

    def _count_excluded(self, name: str) -> None:
        if matches_path(name, self._companions):
            return
        self.n_excluded += 1
        if len(self._excluded_examples) < MAX_EXAMPLES:
            self._excluded_examples.append(name)

    def compute_fingerprint(self) -> str:
        """Hash the files' names, sizes and versions: the hash changes with the corpus."""
        entries = [[file.name, file.size, file.version] for file in self.files]
        return blake3(json.dumps(entries).encode()).hexdigest()

    def move_to_front(self, patterns: Sequence[str]) -> None:
        """Put files whose paths match before all others, so that they keep duplicated texts. Raises UsageError if a
        pattern matches none, or all files match."""
        for pattern in patterns:
            if not any(matches_path(file.name, [pattern]) for file in self.files):
                examples = ", ".join(file.name for file in self.files[:3])
                raise UsageError(
                    f"split.validation_files: {pattern!r} matches no file below {self.root}, where there are {examples}"
                    f"{', …' if len(self.files) > 3 else ''}"
                )
        self.files.sort(key=lambda file: not matches_path(file.name, patterns))
        if matches_path(self.files[-1].name, patterns):
            raise UsageError("split.validation_files: all files would be held out: leave some for training")

    def skip_or_refuse(self, path: str, reason: str) -> None:
        """Record an unusable file. Raises MegatfmError unless such files are skipped."""
        reason = replace_surrogates(reason)
        if not self._skip_bad:
            raise MegatfmError(f"{path}: {reason}; mend it, or skip and list all such files: read.on_error=skip")
        self.bad.append(BadFile(path, reason))

    def find_format(self, file: InputFile) -> str:
        """Return the name of a file's format."""
        return find_format(file.name, self.config, lambda size: self._read_head(file, size))

    def _read_head(self, file: InputFile, size: int) -> bytes:
        """Read the first bytes of a file; none if it can't be read, which the reader will report."""
        if self._remote:
            return self._remote.read_head(self._remote_files[file.name], size)
        try:
            with open(file.path, "rb") as content:
                return content.read(size)
        except OSError:
            return b""

    @contextmanager
    def fetch(self, file: InputFile, companions: Sequence[str] = ()) -> Iterator[Path]:
        """Yield a local path of a file. companions: suffixes of files to put beside it."""
        if not self._remote:
            yield Path(file.path)
            return
        assert self._scratch is not None
        stem, _, _ = file.name.rpartition(".")
        folder = self._scratch / blake3(file.name.encode()).hexdigest(8)
        names = [file.name, *(name for suffix in companions if (name := stem + suffix) in self._remote_files)]
        for name in names:
            self._remote.download(self._remote_files[name], folder / name.rpartition("/")[2])
        yield folder / file.name.rpartition("/")[2]
        # Only after success, so that a retry needn't fetch the files again.
        shutil.rmtree(folder, ignore_errors=True)

    def _walk_remote(self, remote: RemoteFolder) -> Iterator[InputFile]:
        """List a remote folder in the order and by the names of `_walk`."""
        files_by_components = [(tuple(file.name.split("/")), file) for file in remote.list_files()]
        self._remote_files = {file.name: file for _, file in files_by_components}
        names: dict[tuple[str, ...], set[str]] = {}
        for components, _ in files_by_components:
            for depth in range(len(components)):
                names.setdefault(components[:depth], set()).add(components[depth])
        excluded = {folder: self._list_excluded_patterns(folder_names) for folder, folder_names in names.items()}
        excluded_paths = set[tuple[str, ...]]()
        for components, file in sorted(
            files_by_components, key=lambda entry: [component.encode() for component in entry[0]]
        ):
            excluded_depths = (
                depth + 1
                for depth, component in enumerate(components)
                if matches_path(component, (".*", *excluded[components[:depth]]))
            )
            if (depth := next(excluded_depths, 0)) or not matches_path(components[-1], self._include):
                excluded_paths.add(components[: depth or len(components)])
            else:
                name = file.name.replace("#", "%23")
                self._remote_files[name] = file
                yield InputFile(f"{remote.url}/{file.name}", name, file.size, file.version)
        for components in sorted(excluded_paths):
            self._count_excluded("/".join(components))

    def _list_excluded_patterns(self, names: Iterable[str]) -> Sequence[str]:
        """Return the patterns of files to exclude from a folder with these names."""
        is_dataset = any(name.endswith(".arrow") or name == "dataset_dict.json" for name in names)
        return (*self._exclude, *(_DATASETS_FILES if is_dataset else ()))

    def _walk(self, root: Path) -> Iterator[InputFile]:
        """List files depth first, sorted by name. Links are followed; one that leads back to a folder above is bad."""
        stack = [(self._list_entries(root), _identify_file(root))]
        while stack:
            path = next(stack[-1][0], None)
            if path is None:
                stack.pop()
                continue
            try:
                status = path.stat()
            except OSError as error:
                self.skip_or_refuse(str(path), f"can't be read ({error.strerror})")
                continue
            if stat.S_ISDIR(status.st_mode):
                identity = (status.st_dev, status.st_ino)
                if identity in [above for _, above in stack]:
                    self.skip_or_refuse(str(path), "is a link that leads back to a folder above it")
                else:
                    self.folders.append(_make_name(path.relative_to(root)))
                    stack.append((self._list_entries(path), identity))
            elif not matches_path(path.name, self._include):
                self._count_excluded(_make_name(path.relative_to(root)))
            elif stat.S_ISREG(status.st_mode):
                yield InputFile(str(path), _make_name(path.relative_to(root)), status.st_size, status.st_mtime_ns)
            else:
                self.skip_or_refuse(str(path), "is not a file but a device, pipe or socket")

    def _list_entries(self, folder: Path) -> Iterator[Path]:
        try:
            paths = sorted(folder.iterdir(), key=os.fsencode)
        except OSError as error:
            self.skip_or_refuse(str(folder), f"can't list this folder ({error.strerror})")
            return
        exclude = self._list_excluded_patterns(path.name for path in paths)
        for path in paths:
            if matches_path(path.name, (".*", *exclude)):
                self._count_excluded(_make_name(path.relative_to(str(self.root))))
            else:
                yield path


def matches_path(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a path below the folder, or a name, matches one of the patterns; a `*` matches slashes, too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def chunk_by_bytes(sizes: Sequence[int], part_bytes: int) -> list[tuple[int, int]]:
    """Cut a list of files into runs of about `part_bytes`: (first, end) of each, at least one."""
    ends, size = [], 0
    for index, file_size in enumerate(sizes):
        if size >= part_bytes:
            ends.append(index)
            size = 0
        size += file_size
    ends.append(len(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _find_root(config: ReadConfig) -> Path:
    kind = "images, or tars of them" if config.format == "images" else "text files"
    root = Path(config.folder if config.folder is not None else sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UsageError(f"{root}: no such folder: set read.folder to a folder of {kind}")
    if not root.is_dir():
        raise UsageError(f"{root}: is a file, not a folder: set read.folder to the folder that holds it")
    return root


def _identify_file(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _make_name(relative: Path) -> str:
    """Return the path with `/`; bytes that aren't UTF-8 become escapes, and `#`, which marks parts, becomes %23."""
    return os.fsencode(relative).decode("utf-8", "backslashreplace").replace("#", "%23")


class DocumentReader:
    """Reads a corpus's files as documents of at most `limit` bytes.

    files: the files to read; by default all. bad_files: unusable files to count; by default all that are known.
    """

    def __init__(
        self,
        inputs: InputFiles,
        limit: int,
        files: Sequence[InputFile] | None = None,
        bad_files: Sequence[BadFile] | None = None,
    ) -> None:
        self.counts = StepStats("read")
        self._inputs = inputs
        self._config: ReadConfig = inputs.config
        self._limit = limit
        self._files = inputs.files if files is None else files
        self._bad_files = inputs.bad if bad_files is None else bad_files

    def iter_documents(self, advance: Callable[[int], None]) -> Iterator[Document]:
        """Yield the documents of all files; `advance` is called with the bytes of every finished file."""
        for bad in self._bad_files:
            self._drop(bad.reason, 0, bad.where)
        for file in self._files:
            name = self._inputs.find_format(file)
            with self._inputs.fetch(file) as path:
                for document in self._read_text(file, path) if name == "text" else self._read_records(file, path, name):
                    self.counts.count_input(document.text_bytes)
                    if document.text.strip():
                        self.counts.count_kept(document.text_bytes)
                        yield document
                    else:
                        self.counts.count_dropped("empty", document.text_bytes, document.id)
            advance(file.size)

    def _read_text(self, file: InputFile, path: Path) -> Iterator[Document]:
        """Yield the parts of a text file, or none if it is bad.

        The file is read twice: a partly bad file must not be used, and a large one must not be held in memory.
        """
        try:
            n_parts = sum(1 for _ in read_text(path, self._limit))
        except (OSError, BadFileError) as error:
            reason = f"can't be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            self._inputs.skip_or_refuse(file.path, reason)
            self._drop(reason.partition(" at byte ")[0], file.size, f"{file.name}: {reason}")
            return
        self.counts.changed += n_parts > 1
        try:
            for part, text in zip(range(n_parts), read_text(path, self._limit), strict=True):
                if n_parts == 1:
                    yield Document(file.name, text)
                else:
                    yield Document(f"{file.name}#{part}", text, record=file.name)
        except (OSError, BadFileError, ValueError) as error:  # ValueError: of zip
            raise MegatfmError(
                f"{file.path}: changed while it was read ({error}): run the same command again"
            ) from None

    def _read_records(self, file: InputFile, path: Path, name: str) -> Iterator[Document]:
        """Yield the records of a file. All unusable records are counted, and the first one is reported."""
        is_reported = False
        try:
            for record in get_reader(name)(path, self._config):
                source = f"{file.name}#{record.key}"
                if isinstance(record, BadRecord):
                    if not is_reported:
                        self._inputs.skip_or_refuse(file.path, f"record {record.key} {record.reason}")
                    is_reported = True
                    self._drop(record.reason, 0, source)
                    continue
                texts = list(cut_text(record.text, self._limit))
                self.counts.changed += len(texts) > 1
                for part, text in enumerate(texts):
                    if len(texts) == 1:
                        yield Document(source, text, record.url, fields=record.fields)
                    else:
                        yield Document(f"{source}.{part}", text, record.url, fields=record.fields, record=source)
        except BadFileError as error:
            self._inputs.skip_or_refuse(file.path, str(error))
            self._drop("unreadable file", 0, f"{file.name}: {error}")

    def _drop(self, reason: str, size: int, example: str) -> None:
        self.counts.count_input(size)
        self.counts.count_dropped(to_drop_reason(reason), size, example)
