"""Plain text, perhaps under compression: strict UTF-8, long files cut at blank lines."""

from collections.abc import Iterator
from pathlib import Path

from megatfm.data_prep.readers.record import BadFileError, opened


def texts(path: Path, limit: int) -> Iterator[str]:
    """The text in pieces of at most `limit` bytes. Raises BadFileError, with the byte, for what is no UTF-8."""
    offset = 0
    for data in pieces(path, limit):
        if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise BadFileError("is UTF-16, not UTF-8 (convert it with: iconv -f UTF-16 -t UTF-8)")
        if (zero := data.find(b"\0")) >= 0:
            raise BadFileError(f"is a binary file, with a zero at byte {offset + zero}")
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadFileError(f"is not valid UTF-8 at byte {offset + error.start}") from None
        offset += len(data)


def pieces(path: Path, limit: int) -> Iterator[bytes]:
    """The bytes of a file, unpacked, in pieces of at most `limit`; cut after a blank line, a line, or a character."""
    with opened(path) as file:
        data = file.read(limit)
        while more := file.read(limit):
            data += more
            while len(data) > limit:
                cut = _cut(data, limit)
                yield data[:cut]
                data = data[cut:]
        yield data


def cut_text(text: str, limit: int) -> Iterator[str]:
    """A text in pieces of at most `limit` bytes, cut in the same way."""
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
    # Bytes 10xxxxxx continue a character, which has at most three of them; longer runs are no UTF-8 anyway.
    return next((cut for cut in range(limit, limit - 4, -1) if data[cut] & 0xC0 != 0x80), limit)
