"""Just enough of protobuf's wire format for SentencePiece's files.

The protobuf package would do as well, were it not that its version must fit the one SentencePiece was built with.
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types (protobuf.dev/programming-guides/encoding)."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer at `at`, seven bits to a byte, and where it ends."""
    value, shift = 0, 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def as_varint(value: int) -> bytes:
    """The reverse of `read_varint`."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message, in its order; numbers of fixed width are left as bytes."""
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = read_varint(message, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = read_varint(message, at)
        else:
            size = {FIXED64: 8, FIXED32: 4}[kind]
        yield number, message[at : at + size]
        at += size
