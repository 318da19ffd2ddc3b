"""zstd frames unpacked, one or many at once, each held against the size that it should have."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

_BLOCK_HEADER = 3
_RLE = 1  # such a block is one byte, to be repeated
_CHECKSUM = 4


class BadFrame(Exception):
    """A frame is not what it should be; the message is only the reason."""


def decompress_frame(packed: bytes, size: int) -> bytes:
    """The `size` bytes of a frame. Raises BadFrame."""
    try:
        _check_size(packed, size)
        return _decompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrame(str(error)) from error


def decompress_frames(packed: Sequence[bytes], sizes: Sequence[int]) -> list[memoryview]:
    """The same for many in one call, which keeps the interpreter for as long as one alone does.

    What is returned is one piece of memory, which stays until nothing of it is needed. Raises BadFrame.
    """
    if not packed:
        return []
    try:
        for data, size in zip(packed, sizes, strict=True):
            _check_size(data, size)
            if _end(data) != len(data):
                raise BadFrame("its frame ends elsewhere")
        expected = np.array(sizes, "<u8").tobytes()
        # The library's annotations know neither that lists of bytes are taken nor that segments are buffers.
        unpack_all: Any = _decompressor().multi_decompress_to_buffer
        return [memoryview(each) for each in unpack_all(packed, decompressed_sizes=expected, threads=1)]
    except zstandard.ZstdError as error:
        raise BadFrame(str(error)) from error


def _check_size(packed: bytes, size: int) -> None:
    """Before anything is allocated for it."""
    found = zstandard.frame_content_size(packed)
    if found != size:
        raise BadFrame(f"holds {found} bytes, the index says {size}")


def _end(packed: bytes) -> int:
    """Where a frame ends, by the headers of its blocks (RFC 8878, section 3.1.1)."""
    at, last = zstandard.frame_header_size(packed), False
    while not last and at < len(packed):
        header = int.from_bytes(packed[at : at + _BLOCK_HEADER], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += _BLOCK_HEADER + (1 if kind == _RLE else size)
    return at + _CHECKSUM * zstandard.get_frame_parameters(packed).has_checksum


_local = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """One for each thread, since making one takes as long as unpacking a small frame."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found
