"""Classes of images, from folder names, tables, or fields beside them, stored as each image's `.cls`."""

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from megatfm.config.prep import LabelsConfig
from megatfm.corpus.webdataset_images import LabelRule, are_captions, parse_class_number, read_class_names
from megatfm.data_prep.readers.images import ImageRecord
from megatfm.data_prep.readers.record import MAX_RECORD_BYTES, BadRecord, replace_surrogates
from megatfm.data_prep.readers.text import read_json_lines
from megatfm.errors import UsageError

MAX_SHOWN = 5


class ClassLabels:
    """The classes of a corpus. names: class names in the order of the classes; empty if labels are numbers.

    sources, folders: names of the image files and of all folders below the corpus folder. Raises UsageError for a
    folder without images, whose class would be missing.
    """

    def __init__(self, config: LabelsConfig, sources: Sequence[str], folders: Iterable[str] = ()) -> None:
        self._config = config
        self._table = _read_table(config) if config.by == "table" else {}
        self.names = self._list_class_names(sources)
        if self.names and config.by == "folder" and config.classes is None:
            _check_no_empty_folder(sources, folders)
        self._rule = LabelRule(config.by, config.key, self.names)

    @property
    def fingerprint(self) -> str:
        """Hash of names and table, on which the labels depend."""
        return blake3(json.dumps([self.names, sorted(self._table.items())]).encode()).hexdigest(length=16)

    def apply(self, source: str, image: ImageRecord) -> ImageRecord | BadRecord:
        """Return the image with its class in `.cls`, or why it has none. source: its path, or `TAR#KEY`."""
        if self._config.by == "cls":
            return image
        name = self._find_class(source, image.members)
        if name is None:
            return BadRecord(image.key, f"has no label by {self._where}")
        number = self._rule.find_class_index(name)
        if number is None:
            known_labels = f"the {len(self.names)} of read.labels.classes" if self.names else "numbers"
            return BadRecord(image.key, f"has a label that is none of {known_labels}: {name!r}")
        members = {extension: data for extension, data in image.members.items() if extension != "cls"}
        first = next(iter(members))
        labelled = {first: members.pop(first), "cls": b"%d" % number, **members}
        return ImageRecord(image.key, labelled, image.text)

    def get_class_name(self, members: Mapping[str, bytes]) -> str:
        """Return the name of an image's class, or its number if classes have no names; "" without a class."""
        text = members.get("cls", b"").removeprefix(codecs.BOM_UTF8).strip()
        number = parse_class_number(text)
        return self.names[number] if number is not None and number < len(self.names) else text.decode()

    @property
    def _where(self) -> str:
        """The source of labels, for error messages."""
        return {
            "folder": "read.labels.by = 'folder': it lies in no folder",
            "table": f"the table {self._config.table}",
            "json": f"the field {self._config.key!r} of its .json",
            "txt": "its .txt",
        }[self._config.by]

    def _find_class(self, source: str, members: Mapping[str, bytes]) -> str | None:
        path = source.partition("#")[2] or source
        if self._config.by == "folder":
            return get_parent_folder(path)
        if self._config.by == "table":
            stem = path.rpartition("/")[2]
            keys = (path, stem, path.rpartition(".")[0] or path, stem.rpartition(".")[0] or stem)
            return next((self._table[key] for key in keys if key in self._table), None)
        return self._rule.label(members)

    def _list_class_names(self, sources: Sequence[str]) -> list[str]:
        if self._config.classes is not None:
            setting = f"read.labels.classes = {self._config.classes!r}"
            return read_class_names(Path(self._config.classes), setting)
        if self._config.by == "table":
            class_names = set(self._table.values())
        elif self._config.by == "folder":
            class_names = {name for source in sources if (name := get_parent_folder(source)) is not None}
        else:
            return []  # values of fields are unknown before they are read
        if not class_names and self._config.by == "folder":
            raise UsageError(
                "read.labels.by = 'folder': no image lies in a folder of a class: name files CLASS/IMAGE.jpg, or for "
                "tars list the classes in read.labels.classes"
            )
        if all(LabelRule().find_class_index(name) is not None for name in class_names):
            return []  # numbers are classes themselves; sorted as names, 10 would come before 2
        if self._config.by == "table" and are_captions(len(class_names), len(self._table)):
            raise UsageError(
                f"read.labels.table = {self._config.table!r}: {len(class_names):,} of {len(self._table):,} images "
                f"have a label of their own, as {next(iter(self._table.values()))[:60]!r}: these are captions: "
                "write each into a .txt beside its image and leave read.labels out, or list the classes in "
                "read.labels.classes"
            )
        return sorted(class_names)


def get_parent_folder(path: str) -> str | None:
    """Return the name of a file's folder; None if it has none."""
    folders = path.split("/")[:-1]
    return folders[-1] if folders else None


def _check_no_empty_folder(sources: Sequence[str], folders: Iterable[str]) -> None:
    """Raise a UsageError for a folder without images: classes are numbered by name, so later ones would move."""
    with_images = {str(parent) for source in sources for parent in PurePosixPath(source).parents}
    empty = next((folder for folder in folders if folder not in with_images), None)
    if empty is not None:
        name = empty.replace("%23", "#")
        raise UsageError(
            f"read.labels.by = 'folder': the folder {name} holds no JPEG, PNG or WebP, so its class would be missing "
            "and later ones numbered one lower: add its images, remove the folder, leave it out by read.exclude, or "
            "list all classes in read.labels.classes"
        )


def _read_table(config: LabelsConfig) -> dict[str, str]:
    """Read the label of each file from a table. Raises UsageError for a table without the columns, or damaged."""
    path = Path(config.table or "")
    if not path.is_file():
        raise UsageError(f"read.labels.table = {str(path)!r}: no such file")
    rows = read_json_lines(path) if path.suffix in (".jsonl", ".ndjson") else _iter_csv_rows(path, config)
    table: dict[str, str] = {}
    for line, row in rows:
        file, label = (row.get(key) if isinstance(row, dict) else None for key in (config.file_key, config.key))
        if not isinstance(file, str) or label is None or isinstance(label, dict | list | bool):
            field_names = ", ".join(map(str, list(row)[:MAX_SHOWN])) if isinstance(row, dict) else "no fields"
            raise UsageError(
                f"read.labels.table = {str(path)!r}: line {line} lacks {config.file_key!r} or {config.key!r} (it has "
                f"{field_names}): set read.labels.file_key and read.labels.key"
            )
        name = replace_surrogates(str(label))
        if table.setdefault(file, name) != name:
            raise UsageError(f"read.labels.table = {str(path)!r}: {file!r} has two labels, in line {line} another")
    return table


def _iter_csv_rows(path: Path, config: LabelsConfig) -> Iterator[tuple[int, Any]]:
    """Yield number and cells of each row of a `.csv` or `.tsv`, the first of which names the columns."""
    setting = f"read.labels.table = {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{setting}: is not valid UTF-8 ({error})") from error
    csv.field_size_limit(MAX_RECORD_BYTES)  # for the whole process, as the library has it
    delimiter = "\t" if path.suffix == ".tsv" else ","
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = list(rows.fieldnames or ())
        if repeated := next((key for key in (config.file_key, config.key) if names.count(key) > 1), None):
            raise UsageError(f"{setting}: has the column {repeated!r} twice: give each its own name")
        yield from enumerate(rows, 2)
    except csv.Error as error:
        raise UsageError(f"{setting}: is damaged after line {rows.line_num} ({error}): mend it") from error
