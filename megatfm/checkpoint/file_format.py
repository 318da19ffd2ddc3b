"""The format of a checkpoint on disk: `metadata.json`, and safetensors files.

`metadata.json` is `{"blake3": HASH, "metadata": BODY}`; the hash covers the bytes of BODY as they stand, so that no
flipped bit of it passes. It has the hash of every safetensors file, which is written as a stream and believed only
under that hash. Everything that is read is checked before it is used: a hash keeps away accidents, not a forger.

The safetensors library would read and write the same files, but it holds a second copy of the tensors while it
serialises, and it hands out memory maps, in which a file that shrinks kills the process instead of raising.
Format: https://github.com/huggingface/safetensors#format (u64 header length, JSON header, tensor bytes).
"""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from torch import Tensor

from megatfm.checkpoint import chunked_io, file_io
from megatfm.checkpoint.sharded_tensor import check_cover
from megatfm.errors import MegatfmError
from megatfm.ops.transfer import aligned_bytes
from megatfm.version import __version__

METADATA_FILENAME = "metadata.json"
SCHEMA = 1
DIRECT_BYTES = 32 * 2**20
"""Files from here on are written, and on demand read, past the page cache."""

# Dtypes that can be stored, by their names in safetensors.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Nothing that a path could hide in.
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}-[0-9]{3,}\.safetensors$")]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**60)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return name


def _check_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(max(1, size) for size in shape) >= 2**60:  # beyond it, torch's own arithmetic overflows
        raise ValueError(f"absurd shape {shape}")
    return shape


DType = Annotated[str, AfterValidator(_check_dtype)]
Shape = Annotated[tuple[Count, ...], AfterValidator(_check_size)]


class NewerFormatError(MegatfmError):
    """A checkpoint of a later format: sound, so it must be neither passed over nor put aside."""


class StrictModel(BaseModel):
    """Base of tables read from disk: the declared fields and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(StrictModel):
    """A safetensors file: its size in bytes and the BLAKE3 of its content."""

    bytes: Count
    blake3: Hash


class Piece(StrictModel):
    """One stored block of a tensor: where it lies in the tensor, and under which key of which file."""

    offsets: tuple[Count, ...]
    sizes: Shape
    file: FileName
    key: str


class TensorEntry(StrictModel):
    """A tensor as a whole, and the pieces that make it up."""

    dtype: DType
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return DTYPES[self.dtype]

    def bytes_of(self, piece: Piece) -> int:
        """The bytes of one piece in its file."""
        return prod(piece.sizes) * self.torch_dtype.itemsize


class Metadata(StrictModel):
    """Everything about a checkpoint but the tensors' values. `state` is the caller's own JSON."""

    format: Literal["megatfm-checkpoint"] = "megatfm-checkpoint"
    schema_version: Literal[1] = 1
    step: Count
    state: dict[str, JsonValue]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]

    def names(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every tensor's dtype and global shape by name."""
        return {name: (entry.torch_dtype, entry.shape) for name, entry in self.tensors.items()}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        tensor_bytes: dict[str, int] = defaultdict(int)
        for name, tensor in self.tensors.items():
            check_cover(name, tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces])
            for piece in tensor.pieces:
                tensor_bytes[piece.file] += tensor.bytes_of(piece)
        for file in {*tensor_bytes, *self.files}:
            if file not in self.files:
                raise MegatfmError(f"it places tensors in {file}, which it doesn't list")
            if tensor_bytes[file] > self.files[file].bytes:
                raise MegatfmError(
                    f"it places {tensor_bytes[file]} bytes of tensors in {file}, which has {self.files[file].bytes}"
                )
        return self


def check_json_round_trip(state: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a copy of the state; raise if JSON would change anything in it (tuples, NaN, keys that are no text)."""
    plain: dict[str, JsonValue] = {}
    for key, value in state.items():
        try:
            plain[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise MegatfmError(f"state {key!r} can't be stored as JSON: {error}") from error
        if not isinstance(key, str) or not _json_equal(value, plain[key]):
            raise MegatfmError(
                f"state {key!r} would not come back from JSON as it is: use lists, text keys and plain numbers"
            )
    return plain


def _json_equal(value: object, back: object) -> bool:
    """Return whether two JSON values are equal including their types: 1, 1.0 and True are three values."""
    if type(value) is not type(back):
        return False
    if isinstance(value, dict) and isinstance(back, dict):
        return list(value) == list(back) and all(_json_equal(value[key], back[key]) for key in value)
    if isinstance(value, list) and isinstance(back, list):
        return len(value) == len(back) and all(map(_json_equal, value, back))
    return value == back


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of `metadata.json`; equal metadata gives equal bytes."""
    body = json.dumps(metadata.model_dump(), allow_nan=False).encode()
    return _metadata_head(body) + body + b"}\n"


def _metadata_head(body: bytes) -> bytes:
    return b'{"blake3": "%s", "metadata": ' % blake3(body).hexdigest().encode()


def first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong, on one line: where, and what."""
    first = error.errors()[0]
    value = f", not {first['input']!r:.80}" if isinstance(first["input"], str | int | float) else ""
    return f"{'.'.join(map(str, first['loc'])) or 'content':.200}: {first['msg']:.200}{value}"


def read_metadata(folder: Path) -> Metadata:
    """Read and check a checkpoint's metadata; raises MegatfmError with the file and its fault."""
    return parse_metadata(folder, file_io.read_file(folder / METADATA_FILENAME))


def parse_metadata(folder: Path, raw: bytes) -> Metadata:
    """Check the bytes of a `metadata.json`; folder: which one errors name. Raises as `read_metadata`."""
    path = folder / METADATA_FILENAME
    length = len(_metadata_head(b""))
    head, body, tail = raw[:length], raw[length:-2], raw[-2:]
    if head[:12] != _metadata_head(b"")[:12] or tail != b"}\n":
        raise MegatfmError(f"{path} is not a checkpoint's metadata, or was cut short")
    if head != _metadata_head(body):
        raise MegatfmError(f"{path} is damaged: its content doesn't have its hash")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MegatfmError(f"{path} is not JSON: {error}") from error
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if type(schema) is int and schema > SCHEMA:
        state = content.get("state")
        writer = state.get("megatfm") if isinstance(state, dict) else None
        raise NewerFormatError(
            f"{path} was written by a newer megatfm ({writer!s:.40}, schema version {schema}); this is {__version__}, "
            f"which reads {SCHEMA}: go on with that version"
        )
    if schema != SCHEMA:
        raise MegatfmError(f"{path} has schema version {schema!r:.40}, but this megatfm reads {SCHEMA}")
    try:
        return Metadata.model_validate(content)
    except ValidationError as error:
        raise MegatfmError(f"{path} is not valid: {first_error(error)}") from error
    except (MegatfmError, RecursionError) as error:
        raise MegatfmError(f"{path} is not valid: {error}") from error


# ---------------------------------------------------------------------------------------- safetensors files


class _HeaderEntry(StrictModel):
    dtype: DType
    shape: Shape
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _HeaderEntry])


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write the tensors (of any device and stride) into a new file. Equal tensors give equal bytes."""
    direct_io = sum(tensor.nbytes for tensor in tensors.values()) >= DIRECT_BYTES
    block = chunked_io.BLOCK_BYTES if direct_io else 8

    def place(key: str) -> tuple[bool, int, str]:
        """Put tensors of complete blocks first, which then lie at blocks; then wide types, each aligned to its type."""
        return direct_io and tensors[key].nbytes % block > 0, -tensors[key].dtype.itemsize, key

    parts = _safetensors_parts({key: tensors[key] for key in sorted(tensors, key=place)}, block)
    size, digest = file_io.write_file(path, parts, direct_io)
    return FileEntry(bytes=size, blake3=digest)


def _safetensors_parts(tensors: Mapping[str, Tensor], block: int) -> Iterator[memoryview]:
    entries, end = {}, 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % block)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for tensor in tensors.values():
        yield _bytes(tensor.detach().cpu().contiguous())


def read_safetensors(
    path: Path, entry: FileEntry, destinations: Mapping[str, Tensor | None], direct_io: bool = False
) -> dict[str, Tensor]:
    """Return the file's tensors; raises MegatfmError unless the content has its hash.

    destinations: key → tensor to fill in place (it must fit), or None for a new tensor. Keys that are absent are hashed
    but not kept: a meta tensor takes their place. After an error, destinations hold undefined values. direct_io: bypass
    the page cache for a large file, which no other rank of this machine reads.
    """
    with file_io.HashedFile(path, direct_io and entry.bytes >= DIRECT_BYTES) as file:
        if file.size != entry.bytes:
            raise MegatfmError(f"{path} is damaged: it has {file.size} bytes instead of {entry.bytes}")
        problem = None
        try:
            tensors = _read_tensors(file, destinations)
        except ValidationError as error:
            problem = first_error(error)
        except (ValueError, struct.error) as error:
            problem = str(error)
        if file.hexdigest() != entry.blake3:
            raise MegatfmError(f"{path} is damaged: its content doesn't have its hash")
    if problem is not None:
        raise MegatfmError(f"{path} is not a safetensors file: {problem}")
    return tensors


def can_read_in_place(destination: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a file's tensor can be read right into a place."""
    return (
        destination.dtype == dtype and tuple(destination.shape) == shape and destination.device.type == "cpu"
    ) and destination.is_contiguous()


def _read_tensors(file: file_io.HashedFile, destinations: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    if file.size < 8:
        raise ValueError(f"it has only {file.size} bytes")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > file.remaining:
        raise ValueError(f"its header claims {length} bytes")
    entries = _HEADER.validate_json(bytes(file.read(length)))
    tensors, at = {}, 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, (start, end) = DTYPES[entry.dtype], entry.data_offsets
        if start != at or end - start > file.remaining or end - start != prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"tensor {key} of shape {entry.shape} is said to lie at {start} to {end}")
        at = end
        if key not in destinations:
            tensors[key] = torch.empty(entry.shape, dtype=dtype, device="meta")
            file.skip(end - start)
            continue
        destination = destinations[key]
        is_in_place = destination is not None and can_read_in_place(destination, dtype, entry.shape)
        tensors[key] = (
            destination if destination is not None and is_in_place else _empty_aligned(entry.shape, dtype)
        )
        file.read_into(_bytes(tensors[key]))
    return tensors


def _empty_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor."""
    return torch.from_numpy(aligned_bytes(prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
