"""What readers of all formats share: records, bad ones, and files under compression."""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as field_of
from pathlib import Path
from typing import IO, Any

import zstandard

from megatfm.config.prep_steps import FieldsConfig
from megatfm.data_prep.readers.unpacked import open_xz, open_zstd

MAX_RECORD_BYTES = 2**28
"""A longer record is no text that anyone wants: a broken file, or a bomb."""

MOST_NAMES = 30
"""Fields of a record that are told."""

# What the libraries of compression raise on damage. A gzip file that ends too soon is an EOFError.
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@dataclass(frozen=True)
class Record:
    """One text of a file: where it lies there (a line, a row, a key), its address if it has one, and the fields
    that are kept."""

    key: str
    text: str
    url: str = ""
    fields: Mapping[str, Any] = field_of(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("key", "text", "url"):
            object.__setattr__(self, name, spelled(getattr(self, name)))


@dataclass(frozen=True)
class Bad:
    """A record that can't be used: where it lies, and why, as what follows "it" (`has no text`)."""

    key: str
    reason: str

    def __post_init__(self) -> None:
        for name in ("key", "reason"):
            object.__setattr__(self, name, spelled(getattr(self, name)))


class BadFileError(Exception):
    """A file that can't be read, or not further; the text says why and where."""


def spelled(text: str) -> str:
    """A text without halves of surrogate pairs, which JSON and names in tars can have and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file for reading, decompressed as its name says; damage, at opening or later, is a BadFileError."""
    try:
        with _open(path) as file:
            yield file
    except DECOMPRESSION_ERRORS as error:
        if isinstance(error, OSError) and error.strerror and not isinstance(error, gzip.BadGzipFile):
            raise BadFileError(f"can't be read ({error.strerror})") from None
        raise BadFileError(f"is damaged or cut off ({error})") from None


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix in (".gz", ".tgz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".bz2":
        return bz2.open(path, "rb")
    if suffix == ".xz":
        return open_xz(path)
    if suffix == ".zst":
        return open_zstd(path)
    return open(path, "rb")


def get_nested(record: Any, name: str) -> Any:
    """`a.b` of a record: its field `b` inside `a`, or None."""
    for part in name.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def record_from_dict(
    key: str, record: Any, wanted: FieldsConfig, known: Sequence[str] | None = None
) -> Record | Bad:
    """The text of a record with fields. known: their names, where the record has but those that were asked for."""
    text_field = wanted.text
    text, url = get_nested(record, text_field), get_nested(record, wanted.url)
    if not isinstance(text, str):
        kind = "no" if text is None else f"{type(text).__name__}, not text, as"
        names = known or (list(record) if isinstance(record, dict) else [])
        there = f": its fields are {', '.join(map(str, names[:MOST_NAMES]))}" if names else ""
        way_out = "; name the one that holds the text: read.fields.text" if names and text is None else ""
        return Bad(key, f"has {kind} field {text_field!r}{there}{way_out}")
    return Record(key, text, url if isinstance(url, str) else "", selected_metadata(record, wanted))


def selected_metadata(record: Any, wanted: FieldsConfig) -> dict[str, Any]:
    """The fields of a record that are kept; what JSON can't hold (a time, bytes) is spelled."""
    if not wanted.keep or not isinstance(record, dict):
        return {}
    names = [name for name in record if name != wanted.text] if "*" in wanted.keep else wanted.keep
    found = {
        str(name): get_nested(record, name) if "*" not in wanted.keep else record[name] for name in names
    }
    known = {name: value for name, value in found.items() if value is not None}
    said = json.dumps(known, default=_spelled, ensure_ascii=False)
    whole: dict[str, Any] = json.loads(spelled(said), parse_constant=str)
    return whole


def columns(wanted: FieldsConfig, there: Sequence[str]) -> list[str]:
    """The columns of a table that hold the fields, by their outermost names."""
    names = {name.partition(".")[0] for name in (wanted.text, wanted.url, *wanted.keep)}
    return [name for name in there if name in names or "*" in wanted.keep]


def _spelled(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
