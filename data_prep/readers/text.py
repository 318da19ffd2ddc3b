"""Plain text, JSON lines and JSON arrays, perhaps compressed; all in strict UTF-8."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    BadFileError,
    BadRecord,
    Record,
    find_repeated_key,
    open_decompressed,
    parse_json,
    record_from_json,
)
from megatfm.errors import MegatfmError


def read_text(path: Path, limit: int) -> Iterator[str]:
    """Yield the text in parts of at most `limit` bytes. Raises BadFileError at the first byte that isn't UTF-8."""
    offset = 0
    for data in read_blocks(path, limit):
        if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise BadFileError("is UTF-16, not UTF-8 (convert it with: iconv -f UTF-16 -t UTF-8)")
        if (zero := data.find(b"\0")) >= 0:
            raise BadFileError(f"is a binary file, with a zero at byte {offset + zero}")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadFileError(f"is not valid UTF-8 at byte {offset + error.start}") from None
        yield text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(data)


def read_blocks(path: Path, limit: int) -> Iterator[bytes]:
    """Yield a file's decompressed bytes in blocks of at most `limit`, cut after a blank line, a line or a character."""
    with open_decompressed(path) as file:
        data = file.read(limit)
        while block := file.read(limit):
            data += block
            while len(data) > limit:
                cut = _cut(data, limit)
                yield data[:cut]
                data = data[cut:]
        yield data


def cut_text(text: str, limit: int) -> Iterator[str]:
    """Yield a text in parts of at most `limit` bytes, cut like `read_blocks`."""
    data = text.encode() if len(text) > limit // 4 else b""
    while len(data) > limit:
        cut = _cut(data, limit)
        yield data[:cut].decode()
        data = data[cut:]
    yield data.decode() if data else text


def _cut(data: bytes, limit: int) -> int:
    for end in (b"\n\n", b"\n"):
        cut = data.rfind(end, limit // 2, limit)
        if cut >= 0:
            return cut + len(end)
    # Bytes 10xxxxxx continue a character, at most three of them; longer runs are not UTF-8.
    return next((cut for cut in range(limit, limit - 4, -1) if data[cut] & 0xC0 != 0x80), limit)


def read_jsonl(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Read JSON lines: a record a line, with the line's number as key."""
    for number, line in _iter_lines(path):
        key = str(number)
        try:
            record = parse_json(line)
        except UnicodeDecodeError as error:
            yield BadRecord(key, f"is not valid UTF-8: byte {error.start} of its line")
            continue
        except (ValueError, RecursionError):
            yield BadRecord(key, "is not JSON")
            continue
        yield record_from_json(key, record, config)


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and content of each line. Raises MegatfmError for damage, and for a key that is there twice."""
    try:
        for number, line in _iter_lines(path):
            try:
                content = parse_json(line)
            except (ValueError, RecursionError):
                raise BadFileError(f"line {number} is not JSON") from None
            if repeated := find_repeated_key(content, ("*",)):
                raise BadFileError(f"line {number} has a key twice: {repeated!r}")
            yield number, content
    except BadFileError as error:
        raise MegatfmError(f"{path}: {error}: mend it or leave it out") from None


def _iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that aren't blank, numbered from 1."""
    with open_decompressed(path) as file:
        for number, line in number_lines(file):
            if line.strip():
                yield number, line


def number_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield all lines, numbered from 1. Raises BadFileError for a line longer than MAX_RECORD_BYTES."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES + 1), b""), 1):
        if len(line) > MAX_RECORD_BYTES:
            raise BadFileError(f"line {number} is longer than {MAX_RECORD_BYTES:,} bytes")
        yield number, line


def read_json(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Read a JSON array into memory: a record an element, numbered from 1."""
    with open_decompressed(path) as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise BadFileError(
            f"is an array of over {MAX_RECORD_BYTES:,} bytes: make JSON lines of it (jq -c '.[]' a.json > a.jsonl)"
        )
    try:
        elements = parse_json(data)
    except (ValueError, RecursionError):
        raise BadFileError("is not JSON") from None
    if not isinstance(elements, list):
        raise BadFileError("is no array of records")
    for number, element in enumerate(elements, 1):
        yield record_from_json(str(number), element, config)
