"""Rows of small labelled files (.csv, .tsv, .jsonl, .parquet, folders of Hugging Face datasets), and their labels."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatfm.config import TaskConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.registry import did_you_mean

T = TypeVar("T")
Row = Mapping[str, Any]
"""Column → value."""
SPLIT_FILE = re.compile(r"(?:.*[-_.])?(train|validation|valid|val|dev|test)(?:-\d{5}-of-\d{5})?")
"""Name of a split's file without its suffix, as the Hub and the datasets library write it."""
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
MAX_SHOWN = 20
"""Number of labels that an error lists."""
LABEL_SEPARATOR = ";"
INTEGER = re.compile(r"-?\d{1,4000}")
"""Labels that are sorted as numbers; Python reads no longer ones."""


def read_rows(path: str | Path) -> list[Row]:
    """Read all rows of a file, or of a Hugging Face dataset's folder. Raises UsageError that names what is wrong."""
    path = Path(path)
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            rows = _read_dataset_folder(path)
        elif suffix in (".csv", ".tsv"):
            rows = list(_read_delimited(path, "," if suffix == ".csv" else "\t"))
        elif suffix in (".jsonl", ".json"):
            rows = list(_read_json_lines(path))
        elif suffix == ".parquet":
            rows = _read_parquet(path)
        else:
            raise UsageError(
                f"{path}: not a file of a known kind: give {', '.join(SUFFIXES)} or a Hugging Face dataset's folder"
            )
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 at byte {error.start}: save the file as UTF-8") from None
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file: give one with examples") from None
    except OSError as error:
        raise UsageError(f"{path}: can't read it: {error.strerror or error}") from None
    if not rows:
        raise UsageError(f"{path}: has no rows: give a file with examples")
    return rows


def require_columns(path: str | Path, rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Raise UsageError unless the first row has all columns. columns: config key → column name."""
    for key, name in columns.items():
        if name in rows[0]:
            continue
        names = [str(column) for column in rows[0]]
        listed = ", ".join(column if column == column.strip() != "" else repr(column) for column in names)
        remedy = "name one of these"
        if len(names) == 1 and (delimiters := [mark for mark in ";\t|" if mark in names[0]]):
            remedy = f"its fields seem to be separated by {delimiters[0]!r}: save it with commas, or tabs as .tsv"
        raise UsageError(f"{path}: has no column {name!r}, which {key} names; there are: {listed}: {remedy}")


def locate_rows(path: str | Path, rows: Iterable[T]) -> Iterator[tuple[str, T]]:
    """Yield a file's rows, or what was made of them in their order, each with its place for errors: `FILE, row 1`."""
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def read_row_text(place: str, row: Row, column: str) -> str:
    """Return the text of a row's column. place: of the row, for errors. Raises UsageError if it is empty or not a
    text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        description = "empty" if value is None or isinstance(value, str) else f"{value!r:.40}, not text"
        raise UsageError(f"{place}: column {column!r} is {description}: give a text, or take the row out")
    return value


def _read_delimited(path: Path, delimiter: str) -> Iterator[Row]:
    """Read a file whose first line names the columns. Tab-separated files have no quotes, as GLUE's."""
    dialect: Any = {"quoting": csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL, "strict": True}
    text = path.read_bytes().decode("utf-8-sig")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **dialect)
    csv.field_size_limit(2**30)
    columns: list[str] | None = None
    try:
        for fields in reader:
            if not fields:
                continue
            if columns is None:
                columns = fields
                _check_column_names(f"{path}, line 1", columns)
                continue
            if len(fields) != len(columns):
                remedy = "quote a field with ',' in it"
                if delimiter == "\t":
                    remedy = "tabs separate fields within quotes, too: save it as .csv"
                raise UsageError(
                    f"{path}, line {reader.line_num}: has {len(fields)} fields, but the first line names "
                    f"{len(columns)} columns: {remedy}, or mend the line"
                )
            yield dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}: mend the line") from None


def _check_column_names(place: str, names: Sequence[str]) -> None:
    """Raise UsageError for a name that is there twice: a row would have the last of its values alone."""
    if repeated := [name for name in names if names.count(name) > 1]:
        problem = f"names column {repeated[0]!r} twice" if repeated[0] else "has columns without a name"
        raise UsageError(f"{place}: {problem}: give each its own name, or take one out")


def _read_json_lines(path: Path) -> Iterator[Row]:
    text = path.read_bytes().decode("utf-8-sig")
    first_character = text.lstrip()[:1]
    values: Any = None
    if first_character == "{" and path.suffix == ".json" and '"paragraphs"' in text:
        values = _read_squad_rows(path, _parse_json(path, 1, text))
    elif first_character == "[":
        values = _parse_json(path, 1, text)
    if values is None:
        values = [
            _parse_json(path, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
        ]
    for place, value in locate_rows(path, values):
        if not isinstance(value, dict):
            raise UsageError(f"{place}: is no JSON object: give one object a line, column → value")
        yield value


def _read_squad_rows(path: Path, content: Any) -> list[Row]:
    """Read SQuAD's format: articles of paragraphs, each a context with its questions (`qas`)."""
    try:
        return [
            {"id": question["id"], "title": article.get("title", ""), "context": paragraph["context"], **question}
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: begins as a file of SQuAD, but lacks its data, paragraphs or qas ({error}): mend it, or give "
            "one object a line"
        ) from None


def _parse_json(path: Path, number: int, text: str) -> Any:
    try:
        content = json.loads(text, object_pairs_hook=_without_repeated_keys)
        if "\\u" in text:  # an escape may be half of a character
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1].encode("unicode-escape").decode()
        raise UsageError(f"{path}, line {number}: {half} is half of a character (a surrogate): mend the line") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: no JSON: {error}: mend the line") from None
    return content


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's values. Raises ValueError for a key that is there twice, of which one would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is there twice")
    return values


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MegatfmError(f"{path}: parquet is read by pyarrow: `pip install megatfm[tasks]`") from None
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"{path}: can't be read as parquet: {error}") from None
    return rows


def _read_dataset_folder(path: Path) -> list[Row]:
    """Read a folder that `Dataset.save_to_disk` wrote, or one of parquet files, as the Hub stores them.

    Files `cache-*.arrow` are left out: the datasets library keeps results of `map` and `filter` beside the data.
    Raises UsageError for a folder with the files of several splits.
    """
    if parquet := sorted(path.glob("*.parquet")):
        _check_one_split(path, parquet)
        return [row for file in parquet for row in _read_parquet(file)]
    arrow = [file for file in sorted(path.glob("*.arrow")) if not file.name.startswith("cache-")]
    _check_one_split(path, arrow)
    if not arrow:
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        hint = f": give a split, for example {path / splits[0]}" if splits else ": give a file or dataset"
        raise UsageError(f"{path}: holds neither .arrow nor .parquet files{hint}")
    try:
        import pyarrow
    except ImportError:
        raise MegatfmError(f"{path}: Arrow files are read by pyarrow: `pip install megatfm[tasks]`") from None
    rows: list[Row] = []
    for file in arrow:
        try:
            with pyarrow.memory_map(str(file)) as source:
                table = pyarrow.ipc.open_stream(source).read_all()
                _check_column_names(str(file), table.column_names)
                rows += table.to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise UsageError(f"{file}: can't be read as Arrow's stream: {error}: save the dataset again") from None
    return rows


def _check_one_split(folder: Path, files: Sequence[Path]) -> None:
    """Raise UsageError if files are of several splits, such as train and test: their rows would be mixed."""
    splits = sorted({match[1] for file in files if (match := SPLIT_FILE.fullmatch(file.stem))})
    if len(splits) > 1:
        raise UsageError(
            f"{folder}: holds files of several splits ({', '.join(splits)}), which would be read as one: give a file "
            "of one split, or a folder with its files alone"
        )


def format_label(value: Any) -> str:
    """Return a label as the config lists it. Booleans of typed files become `true` and `false`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()


def find_class_index(place: str, label: Any, labels: Sequence[str]) -> int:
    """Return the class of a row's label. place: of the row, for errors. Raises UsageError for an unlisted one."""
    name = "" if label is None else format_label(label)
    if isinstance(label, list | Mapping):
        raise UsageError(
            f"{place}: label {label!r:.60} is no single label: give one, or set task.form = 'multilabel' for lists"
        )
    if not name and name not in labels:
        raise UsageError(f"{place}: has no label: give one, or take the row out")
    if name not in labels:
        listed = ", ".join(labels[:MAX_SHOWN]) + (", …" if len(labels) > MAX_SHOWN else "")
        raise UsageError(
            f"{place}: label {name!r} is none of the task's{did_you_mean(name, labels)}; there are: {listed}: mend the "
            "row, or list it in task.labels"
        )
    return labels.index(name)


def list_labels(task: TaskConfig, row: Row) -> list[str]:
    """Return the labels of a row, unchecked: one, or those of a list or of a text that is split."""
    value = row.get(task.label)
    if task.form != "classification" and isinstance(value, str):
        value = value.split(LABEL_SEPARATOR if task.form == "multilabel" else None)
    return [format_label(item) for item in (value if isinstance(value, list) else [value]) if item is not None]


def collect_labels(task: TaskConfig, rows: Sequence[Row]) -> list[str]:
    """Return the labels of the rows: integers first, by value, then the others by text. Raises UsageError for none,
    and for two spellings of one."""
    names = {name for row in rows for name in list_labels(task, row)} - {""}
    if not names:
        raise UsageError(f"{task.train}: column {task.label!r} is empty: name the column of the labels in task.label")
    if missing := sorted(name for name in names if name.lower() == "nan"):
        raise UsageError(
            f"{task.train}: column {task.label!r} has the label {missing[0]!r}, as missing values are written: mend "
            "its rows, or name all labels in task.labels if it is one"
        )
    spellings: dict[str, str] = {}
    for name in sorted(names):
        bare = unicodedata.normalize("NFC", name)
        number = bare.removesuffix(".0")
        if (earlier := spellings.setdefault(number if INTEGER.fullmatch(number) else bare, name)) != name:
            raise UsageError(
                f"{task.train}: column {task.label!r} has the labels {earlier!r} and {name!r}, two spellings of one: "
                "write it one way, or name all labels in task.labels"
            )
    return sorted(names, key=lambda name: (0, int(name), name) if INTEGER.fullmatch(name) else (1, 0, name))
