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

MAX_RECORD_BYTES = 2**28
"""A longer record is no text that anyone wants: a broken file, or a bomb."""

MOST_NAMES = 30
"""Fields of a record that are told."""

# What the libraries of compression raise on damage. A gzip file that ends too soon is an EOFError.
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@dataclass(frozen=True)
class Record:
    """One text of a file: where it lies there (a line, a row, a key), its address if it has one, and the fields
    that are kept."""

    key: str
    text: str
    url: str = ""
    fields: Mapping[str, Any] = field_of(default_factory=dict)


@dataclass(frozen=True)
class Bad:
    """A record that can't be used: where it lies, and why, as what follows "it" (`has no text`)."""

    key: str
    reason: str


class BadFileError(Exception):
    """A file that can't be read, or not further; the text says why and where."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file for reading, decompressed as its name says; damage, at opening or later, is a BadFileError."""
    try:
        with _open(path) as file:
            yield file
    except DAMAGE as error:
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
        return lzma.open(path, "rb")
    if suffix == ".zst":
        return _WholeZstd(path)  # type: ignore[return-value]
    return open(path, "rb")


class _WholeZstd:
    """A zstd file; unlike the library's own reader it notices that the last frame is cut off."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        self._decompressor = zstandard.ZstdDecompressor().decompressobj()
        self._rest = b""
        self._data = b""
        self._begun = False

    def read(self, size: int = -1) -> bytes:
        parts, got = [], 0
        while size < 0 or got < size:
            if not self._data and not self._fill():
                break
            take = self._data if size < 0 else self._data[: size - got]
            self._data = self._data[len(take) :]
            parts.append(take)
            got += len(take)
        return b"".join(parts)

    def readline(self, limit: int = -1) -> bytes:
        parts, got = [], 0
        while self._data or self._fill():
            at = self._data.find(b"\n") + 1
            take = self._data[: at or len(self._data)]
            if limit >= 0:
                take = take[: limit - got]
            self._data = self._data[len(take) :]
            parts.append(take)
            got += len(take)
            if take.endswith(b"\n") or got == limit:
                break
        return b"".join(parts)

    def _fill(self) -> bool:
        """More decompressed data; False at the end."""
        while not self._data:
            if self._decompressor.eof:  # of one frame; another may follow
                self._rest = self._decompressor.unused_data
                self._decompressor = zstandard.ZstdDecompressor().decompressobj()
                self._begun = False
            chunk, self._rest = self._rest or self._file.read(2**16), b""
            if not chunk:
                if self._begun:
                    raise EOFError("the last frame is not whole")
                return False
            self._begun = True
            self._data = self._decompressor.decompress(chunk)
        return True

    def __enter__(self) -> "_WholeZstd":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def field(record: Any, name: str) -> Any:
    """`a.b` of a record: its field `b` inside `a`, or None."""
    for part in name.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def from_fields(
    key: str, record: Any, wanted: FieldsConfig, known: Sequence[str] | None = None
) -> Record | Bad:
    """The text of a record with fields. known: their names, where the record has but those that were asked for."""
    text_field = wanted.text
    text, url = field(record, text_field), field(record, wanted.url)
    if not isinstance(text, str):
        kind = "no" if text is None else f"{type(text).__name__}, not text, as"
        names = known or (list(record) if isinstance(record, dict) else [])
        there = f": its fields are {', '.join(map(str, names[:MOST_NAMES]))}" if names else ""
        way_out = "; name the one that holds the text: read.fields.text" if names and text is None else ""
        return Bad(key, f"has {kind} field {text_field!r}{there}{way_out}")
    return Record(key, text, url if isinstance(url, str) else "", kept(record, wanted))


def kept(record: Any, wanted: FieldsConfig) -> dict[str, Any]:
    """The fields of a record that are kept; what JSON can't hold (a time, bytes) is spelled."""
    if not wanted.keep or not isinstance(record, dict):
        return {}
    names = [name for name in record if name != wanted.text] if "*" in wanted.keep else wanted.keep
    found = {str(name): field(record, name) if "*" not in wanted.keep else record[name] for name in names}
    known = {name: value for name, value in found.items() if value is not None}
    said = json.dumps(known, default=_spelled, ensure_ascii=False)
    # JSON can spell halves of surrogate pairs, which UTF-8 can't.
    said = said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    whole: dict[str, Any] = json.loads(said, parse_constant=str)
    return whole


def columns(wanted: FieldsConfig, there: Sequence[str]) -> list[str]:
    """The columns of a table that hold the fields, by their outermost names."""
    names = {name.partition(".")[0] for name in (wanted.text, wanted.url, *wanted.keep)}
    return [name for name in there if name in names or "*" in wanted.keep]


def _spelled(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
