"""Records, bad records, metadata and compressed files: shared by the readers of all formats.

Files are decompressed block by block, so that a small file that claims a huge size never fills the memory.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from pathlib import Path
from typing import IO, Any

import zstandard

from megatfm.config.prep import ReadConfig

XZ_MEMORY = 2**28
"""Bytes of memory for decompressing xz; its strongest preset takes 65 MiB."""
_CHUNK = 2**16
_MAGIC, _SKIPPABLE = 0xFD2FB528, 0x184D2A50
_RAW, _REPEATED = 0, 1


class _DecompressedStream(io.RawIOBase):
    """A stream of the blocks that `_fill` returns."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._data:
            block = self._fill()
            if block is None:
                return 0
            self._data = memoryview(block)
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _fill(self) -> bytes | None:
        """Return the next block, maybe empty; None at the end."""
        raise NotImplementedError


class _Zstd(_DecompressedStream):
    """Decompresses any number of frames block by block, at most 128 KiB each (RFC 8878, section 3.1.1.2.4).

    A truncated file raises EOFError at its end. The library's reader is bounded, too, but takes the end of a truncated
    file for the end of the text.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._has_checksum = False

    def _fill(self) -> bytes | None:
        if self._frame is None:
            return b"" if self._begin_frame() else None
        head = self._read(3)
        word = int.from_bytes(head, "little")
        is_last, kind, size = word & 1, word >> 1 & 3, word >> 3
        block = head + self._read(1 if kind == _REPEATED else min(size, 2**17 + 1))
        if is_last and self._has_checksum:
            block += self._read(4)
        content = self._frame.decompress(block)
        if is_last:
            self._frame = None
        return content

    def _begin_frame(self) -> bool:
        """Read the header of the next frame; False if there is none."""
        magic = self._file.read(4)
        if not magic:
            return False
        number = int.from_bytes(magic, "little")
        if number & ~0xF == _SKIPPABLE and len(magic) == 4:
            n_skipped = int.from_bytes(self._read(4), "little")
            while n_skipped:
                n_skipped -= len(self._read(min(n_skipped, _CHUNK)))
            return True
        if number != _MAGIC:
            raise zstandard.ZstdError("no frame begins where one should")
        descriptor = self._read(1)
        flag, is_single, dictionary = descriptor[0] >> 6, descriptor[0] >> 5 & 1, descriptor[0] & 3
        size = (0 if is_single else 1) + (0, 1, 2, 4)[dictionary] + (is_single, 2, 4, 8)[flag]
        self._has_checksum = bool(descriptor[0] >> 2 & 1)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._frame.decompress(magic + descriptor + self._read(size))
        return True

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the last frame is not whole")
        return data


class _Streams(_DecompressedStream):
    """Decompresses any number of streams of bzip2 or xz. A truncated file raises EOFError at its end.

    The library's bz2.open ends without an error at a later stream whose beginning is damaged.
    """

    def __init__(
        self, path: Path, make_decompressor: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
    ) -> None:
        super().__init__(path)
        self._make_decompressor = make_decompressor
        self._stream: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None
        self._unread = self._file.read(_CHUNK)

    def _fill(self) -> bytes | None:
        if self._stream is not None and self._stream.eof:
            # Streams of xz may be padded by zeros, four at a time.
            self._unread = (self._stream.unused_data or self._file.read(_CHUNK)).lstrip(b"\0")
            while not self._unread and (block := self._file.read(_CHUNK)):
                self._unread = block.lstrip(b"\0")
            self._stream = None
        if self._stream is None:
            if not self._unread:
                return None
            self._stream = self._make_decompressor()
        if self._stream.needs_input and not self._unread:
            self._unread = self._file.read(_CHUNK)
            if not self._unread:
                raise EOFError("the last stream is not whole")
        content = self._stream.decompress(self._unread, _CHUNK)
        self._unread = b""
        return content


# The older format .lzma, which is the default's other one, takes zeros for an empty stream.
_make_xz_decompressor = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

MAX_RECORD_BYTES = 2**28
"""Longer records are refused: they come from a damaged file, or from a decompression bomb."""

MAX_LISTED_NAMES = 30
"""Number of fields of a record that an error lists."""

# Errors that the compression libraries raise on damage. A truncated gzip file raises EOFError.
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@dataclass(frozen=True)
class Record:
    """A text of a file. key: its line, row or key in the file. url: "" if unknown. fields: metadata by name."""

    key: str
    text: str
    url: str = ""
    fields: Mapping[str, Any] = dataclass_field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("key", "text", "url"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


@dataclass(frozen=True)
class BadRecord:
    """An unusable record. key: its line, row or key. reason: a phrase after "it", such as `has no text`."""

    key: str
    reason: str

    def __post_init__(self) -> None:
        for name in ("key", "reason"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


class BadFileError(Exception):
    """Damage in a file. The message names what and where."""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON and names in tars can contain and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": lambda path: io.BufferedReader(_Streams(path, bz2.BZ2Decompressor), _CHUNK),
    ".xz": lambda path: io.BufferedReader(_Streams(path, _make_xz_decompressor), _CHUNK),
    ".zst": lambda path: io.BufferedReader(_Zstd(path), 2**17),
}
"""Suffix → function that opens such a file for reading."""


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed by its suffix. Raises BadFileError for damage, at opening or later."""
    try:
        with _OPENERS.get(path.suffix.lower(), partial(open, mode="rb"))(path) as file:
            yield file
    except DECOMPRESSION_ERRORS as error:
        if isinstance(error, OSError) and error.strerror and not isinstance(error, gzip.BadGzipFile):
            raise BadFileError(f"can't be read ({error.strerror})") from None
        raise BadFileError(f"is damaged or cut off ({error})") from None


def get_nested(record: Any, name: str) -> Any:
    """Return field `a.b` of a record, which is `b` inside `a`, or None."""
    for part in name.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


class RepeatedKeyObject(dict[str, Any]):
    """A JSON object in which a key is there twice, with the last value of each. repeated: these keys."""

    repeated: frozenset[str]


def parse_json(data: bytes | str) -> Any:
    """Parse JSON; an object in which a key is there twice becomes a RepeatedKeyObject. Raises as `json.loads`."""
    return json.loads(data, object_pairs_hook=_make_object)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    result, counts = RepeatedKeyObject(values), Counter(name for name, _ in pairs)
    result.repeated = frozenset(name for name, count in counts.items() if count > 1)
    return result


def find_repeated_key(record: Any, field_names: Iterable[str]) -> str | None:
    """Return a key that is there twice in the fields `a.b` of a record that `parse_json` made; None if there is none.

    field_names: the fields that are read, since one value of such a key is lost; "*" for all.
    """
    for field_name in field_names:
        value = record
        for name in field_name.split(".") if field_name != "*" else ():
            if isinstance(value, RepeatedKeyObject) and name in value.repeated:
                return name
            value = value.get(name) if isinstance(value, dict) else None
        unread_values = [value]
        while unread_values:
            value = unread_values.pop()
            if isinstance(value, RepeatedKeyObject):
                return min(value.repeated)
            if isinstance(value, dict | list):
                unread_values += value.values() if isinstance(value, dict) else value
    return None


def record_from_json(key: str, record: Any, config: ReadConfig) -> Record | BadRecord:
    """Return the Record of a value that `parse_json` made, or why it is unusable."""
    if repeated := find_repeated_key(record, (config.text_key, config.url_key, *config.metadata_keys)):
        return BadRecord(key, f"has a key twice: {repeated!r}")
    return record_from_dict(key, record, config)


def record_from_dict(
    key: str, record: Any, config: ReadConfig, field_names: Sequence[str] | None = None
) -> Record | BadRecord:
    """Return the Record of a dictionary, or why it is unusable.

    field_names: all fields of the file, if `record` has only the requested ones.
    """
    text_field = config.text_key
    text, url = get_nested(record, text_field), get_nested(record, config.url_key)
    if not isinstance(text, str):
        problem = "no" if text is None else f"{type(text).__name__}, not text, as"
        names = field_names or (list(record) if isinstance(record, dict) else [])
        field_list = f": its fields are {', '.join(map(str, names[:MAX_LISTED_NAMES]))}" if names else ""
        remedy = "; name the one that holds the text: read.text_key" if names and text is None else ""
        return BadRecord(key, f"has {problem} field {text_field!r}{field_list}{remedy}")
    return Record(key, text, url if isinstance(url, str) else "", select_metadata(record, config))


def select_metadata(record: Any, config: ReadConfig) -> dict[str, Any]:
    """Return the fields of a record that the config names; values outside JSON (times, bytes) become text."""
    if not config.metadata_keys or not isinstance(record, dict):
        return {}
    names = (
        [name for name in record if name != config.text_key] if "*" in config.metadata_keys else config.metadata_keys
    )
    selected = {
        str(name): get_nested(record, name) if "*" not in config.metadata_keys else record[name] for name in names
    }
    non_null = {name: value for name, value in selected.items() if value is not None}
    metadata_json = json.dumps(non_null, default=_to_text, ensure_ascii=False)
    metadata: dict[str, Any] = json.loads(replace_surrogates(metadata_json), parse_constant=str)
    return metadata


def select_columns(config: ReadConfig, column_names: Sequence[str]) -> list[str]:
    """Select the columns of a table that contain the fields, by their outermost names.

    Raises BadFileError if one is there twice, as a record would have the last one only.
    """
    names = {name.partition(".")[0] for name in (config.text_key, config.url_key, *config.metadata_keys)}
    selected = [name for name in column_names if name in names or "*" in config.metadata_keys]
    if repeated := next((name for name in selected if selected.count(name) > 1), None):
        raise BadFileError(f"has the column {repeated!r} twice")
    return selected


def _to_text(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
