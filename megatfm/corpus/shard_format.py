"""Encode samples as members of a tar, byte for byte reproducible, and decode them.

A sample has the members `KEY.tokens.npy` and `KEY.meta.json`, followed by its files, such as `KEY.jpg` and `KEY.cls`,
whose extensions the meta.json lists.

Packed documents, which have no such files, share the two members, under the key of the first document: their tokens
are joined, and the meta.json has the lists "keys", "tokens" (how many), "bytes" and "sources".

Consecutive members form a frame. zstd compresses each frame by itself.
"""

import json
import re
import tarfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from megatfm.corpus.shard_index import MAX_KEY_LENGTH, NPY_HEADER_BYTES
from megatfm.errors import MegatfmError

# WebDataset ends a key at its first dot; without dots and slashes a key is also a safe file name.
KEY = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_KEY_LENGTH}}}")
EXTENSION = re.compile(r"([0-9]{1,4}\.)?[a-z0-9]{1,16}")
END_OF_ARCHIVE = bytes(2 * tarfile.BLOCKSIZE)
PAYLOAD_OFFSET = tarfile.BLOCKSIZE + NPY_HEADER_BYTES
"""Bytes from the start of a sample to its tokens."""
# The header that tarfile writes for an empty file without a name. Filling it in is ten times as fast as tarfile.
_EMPTY_HEADER = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
_NAME, _SIZE, _CHECKSUM = slice(0, 100), slice(124, 135), slice(148, 154)  # POSIX.1-2017, pax, "ustar"
_EMPTY_HEADER_SUM = int(_EMPTY_HEADER[_CHECKSUM], 8) - sum(_EMPTY_HEADER[_SIZE])
_BLOCK_HEADER = 3
_RLE_BLOCK = 1  # such a block is one byte, to be repeated
_CHECKSUM_BYTES = 4
_thread_local = threading.local()


@dataclass(frozen=True, eq=False)
class Sample:
    """One document: `index` in the corpus, `tokens` [n], `source` (where it came from), UTF-8 bytes of its text.

    members: its files by extension (`jpg`, `cls`), unchanged. metadata: JSON fields.
    """

    index: int
    key: str
    source: str
    text_bytes: int
    tokens: NDArray[Any]
    members: Mapping[str, bytes] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def encode_sample(sample: Sample) -> bytes:
    """Return the tar members of a sample, padded to whole tar blocks."""
    key, tokens, members = sample.key, sample.tokens, sample.members
    # ASCII escapes, since a source may be a file name that is no valid Unicode.
    extra_fields: dict[str, Any] = {"fields": dict(sample.metadata)} if sample.metadata else {}
    extra_fields |= {"members": list(members)} if members else {}
    meta = json.dumps({"bytes": sample.text_bytes, **extra_fields, "source": sample.source}).encode("ascii")
    payload = make_npy_header(tokens.dtype, len(tokens)) + tokens.tobytes()
    parts = _make_member(f"{key}.tokens.npy", payload) + _make_member(f"{key}.meta.json", meta)
    return parts + b"".join(_make_member(f"{key}.{extension}", data) for extension, data in members.items())


def decode_sample(
    frame: bytes, start: int, key: str, n_tokens: int, dtype: np.dtype[Any]
) -> tuple[str, int, dict[str, bytes], dict[str, Any], int]:
    """Decode the sample that starts at `start` of a frame; return (source, text bytes, members, metadata, end).

    Raises a MegatfmError, whose message is only the reason, if the members are not those of this sample.
    """
    data, start = _find_meta(frame, start, key, n_tokens, dtype)
    try:
        meta = json.loads(data)
        source, text_bytes, extensions = meta["source"], meta["bytes"], meta.get("members", [])
        fields = meta.get("fields", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MegatfmError(f"its meta.json is not readable ({error})") from error
    if not isinstance(source, str) or type(text_bytes) is not int or not isinstance(fields, dict):
        raise MegatfmError("its meta.json lacks a source or a number of bytes, or has fields that are no table")
    if not isinstance(extensions, list) or not all(
        isinstance(extension, str) and EXTENSION.fullmatch(extension) for extension in extensions
    ):
        raise MegatfmError("its meta.json names members that can't be")
    members: dict[str, bytes] = {}
    for extension in extensions:
        size = _parse_member_size(frame, start, f"{key}.{extension}")
        start += tarfile.BLOCKSIZE
        members[extension] = frame[start : start + size]
        if len(members[extension]) != size:
            raise MegatfmError(f"its .{extension} ends outside its frame")
        start += _round_up_to_block(size)
    if len(members) != len(extensions):
        raise MegatfmError("its meta.json names a member twice")
    return source, text_bytes, members, fields, start


def encode_packed_documents(documents: Sequence[Sample]) -> bytes:
    """Return the two tar members that documents without files share, padded to whole tar blocks."""
    tokens = np.concatenate([document.tokens for document in documents])
    fields = [dict(document.metadata) for document in documents]
    meta = {
        "bytes": [document.text_bytes for document in documents],
        **({"fields": fields} if any(fields) else {}),
        "keys": [document.key for document in documents],
        "sources": [document.source for document in documents],
        "tokens": [len(document.tokens) for document in documents],
    }
    key = documents[0].key
    payload = make_npy_header(tokens.dtype, len(tokens)) + tokens.tobytes()
    return _make_member(f"{key}.tokens.npy", payload) + _make_member(
        f"{key}.meta.json", json.dumps(meta).encode("ascii")
    )


def decode_packed_documents(
    frame: bytes, keys: list[str], n_tokens: list[int], dtype: np.dtype[Any]
) -> tuple[list[str], list[int], list[dict[str, Any]], int]:
    """Decode a frame of packed documents; return (sources, text bytes, metadata, end of the members).

    Raises a MegatfmError, whose message is only the reason, if the members are not those of these documents.
    """
    data, end = _find_meta(frame, 0, keys[0], sum(n_tokens), dtype)
    try:
        meta = json.loads(data)
        sources, text_bytes = meta["sources"], meta["bytes"]
        if meta["keys"] != keys or meta["tokens"] != n_tokens:
            raise MegatfmError("its meta.json has other keys or numbers of tokens than the index")
        fields = meta.get("fields", [{} for _ in keys])
        if not len(sources) == len(text_bytes) == len(fields) == len(keys):
            raise MegatfmError("its meta.json lacks sources or numbers of bytes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MegatfmError(f"its meta.json is not readable ({error})") from error
    if not all(isinstance(source, str) for source in sources) or not all(type(n) is int for n in text_bytes):
        raise MegatfmError("its meta.json lacks a source or a number of bytes")
    if not all(isinstance(metadata, dict) for metadata in fields):
        raise MegatfmError("its meta.json has fields that are no table")
    return sources, text_bytes, fields, end


def _find_meta(frame: bytes, start: int, key: str, n_tokens: int, dtype: np.dtype[Any]) -> tuple[bytes, int]:
    """Return the content of the meta.json behind the tokens that start at `start`, and the end of its member."""
    size = NPY_HEADER_BYTES + n_tokens * dtype.itemsize
    if _parse_member_size(frame, start, f"{key}.tokens.npy") != size:
        raise MegatfmError("its tokens have another size than the index says")
    start += tarfile.BLOCKSIZE + _round_up_to_block(size)
    size = _parse_member_size(frame, start, f"{key}.meta.json")
    start += tarfile.BLOCKSIZE
    return frame[start : start + size], start + _round_up_to_block(size)


def check_external_sample(frame: bytes, start: int, n_tokens: int, dtype: np.dtype[Any]) -> str:
    """Return the name of the member whose tokens start at `start` of a frame of a foreign shard.

    Raises a MegatfmError, whose message is only the reason, if no such member lies there.
    """
    info = _parse_tar_header(frame, start - PAYLOAD_OFFSET, "a sample")
    size = NPY_HEADER_BYTES + n_tokens * dtype.itemsize
    if not info.isreg() or info.size != size:
        raise MegatfmError(f"at byte {start - PAYLOAD_OFFSET} of its frame lies {info.name!r} of another size or kind")
    return info.name


@lru_cache(maxsize=4096)
def make_npy_header(dtype: np.dtype[Any], n: int) -> bytes:
    """Return the .npy header of an array [n], padded to 128 bytes.

    NumPy's writer is not used: its padding has changed between releases, and shards must not change with it.
    Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0.
    """
    description = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({n},), }}"
    text = description.ljust(NPY_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def _make_member(name: str, data: bytes) -> bytes:
    return _make_header(name.encode("ascii"), len(data)) + data.ljust(_round_up_to_block(len(data)), b"\0")


def _make_header(name: bytes, size: int) -> bytes:
    """Return the tar header of a plain file, as tarfile writes it. Names fit, since keys and extensions are short."""
    digits = b"%011o" % size
    header = bytearray(_EMPTY_HEADER)
    header[_NAME] = name.ljust(100, b"\0")
    header[_SIZE] = digits
    header[_CHECKSUM] = b"%06o" % (_EMPTY_HEADER_SUM + sum(name) + sum(digits))
    return bytes(header)


def _parse_tar_header(frame: bytes, start: int, name: str) -> tarfile.TarInfo:
    try:
        header = frame[max(start, 0) : start + tarfile.BLOCKSIZE]
        return tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise MegatfmError(f"no tar header of {name} at byte {start} of its frame ({error})") from error


def _parse_member_size(frame: bytes, start: int, name: str) -> int:
    field = frame[start + _SIZE.start : start + _SIZE.stop]
    # A header that this module wrote is compared as a whole, which takes a fifth of the time of parsing it.
    if start >= 0 and field.isdigit() and name.isascii():
        try:
            size = int(field, 8)
        except ValueError:  # digits that are no octal ones
            size = -1
        if size >= 0 and frame[start : start + tarfile.BLOCKSIZE] == _make_header(name.encode("ascii"), size):
            return size
    info = _parse_tar_header(frame, start, name)
    if info.name != name or not info.isreg():
        raise MegatfmError(f"at byte {start} of its frame lies {info.name!r}, not the file {name!r}")
    return info.size


def _round_up_to_block(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class BadFrameError(Exception):
    """A frame is damaged. The message is only the reason."""


def decompress_frame(compressed: bytes, size: int) -> bytes:
    """Return the `size` bytes of a frame. Raises BadFrameError."""
    try:
        _check_claimed_size(compressed, size)
        data = _get_decompressor().decompress(compressed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrameError(str(error)) from error
    if len(data) != size:
        raise BadFrameError(f"holds {len(data)} bytes, the index says {size}")
    return data


def decompress_frames(compressed: Sequence[bytes], sizes: Sequence[int]) -> list[memoryview]:
    """Decompress many frames in one call, which holds the interpreter's lock no longer than one frame does.

    The results share one buffer, which lives as long as any of them is used. Raises BadFrameError.
    """
    if not compressed:
        return []
    try:
        for data, size in zip(compressed, sizes, strict=True):
            _check_claimed_size(data, size)
            if _find_frame_end(data) != len(data):
                raise BadFrameError("its frame ends elsewhere")
        expected = np.array(sizes, "<u8").tobytes()
        # The library's annotations know neither that lists of bytes are taken nor that segments are buffers.
        unpack_all: Any = _get_decompressor().multi_decompress_to_buffer
        return [memoryview(block) for block in unpack_all(compressed, decompressed_sizes=expected, threads=1)]
    except (zstandard.ZstdError, ValueError) as error:  # ValueError: an unknown size that should be 0
        raise BadFrameError(str(error)) from error


UNKNOWN_SIZE = -1
"""Content size that zstandard returns for a frame that doesn't have it."""


def _check_claimed_size(compressed: bytes, size: int) -> None:
    """Raise BadFrameError if a frame claims another size, before memory is allocated for it.

    A frame from a pipe (`tar … | zstd`) claims none: what it holds is compared once it is unpacked.
    """
    actual = zstandard.frame_content_size(compressed)
    if actual not in (size, UNKNOWN_SIZE):
        raise BadFrameError(f"holds {actual} bytes, the index says {size}")


def _find_frame_end(compressed: bytes) -> int:
    """Return the offset at which a frame ends, by its block headers (RFC 8878, section 3.1.1)."""
    offset, is_last = zstandard.frame_header_size(compressed), False
    while not is_last and offset < len(compressed):
        header = int.from_bytes(compressed[offset : offset + _BLOCK_HEADER], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        offset += _BLOCK_HEADER + (1 if kind == _RLE_BLOCK else size)
    return offset + _CHECKSUM_BYTES * zstandard.get_frame_parameters(compressed).has_checksum


def _get_decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor, since making one takes as long as decompressing a small frame."""
    if not hasattr(_thread_local, "decompressor"):
        _thread_local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _thread_local.decompressor
    return decompressor
