"""Read and write the safetensors files of a checkpoint.

Files are streamed, and a file is accepted only if it has the hash in `metadata.json`. The header is validated as well,
because a hash protects against accidents, not against forgery.

The safetensors library reads and writes the same files, but it holds a second copy of the tensors while it serialises,
and it returns memory maps: if a mapped file shrinks, the process is killed instead of raising.
Format: https://github.com/huggingface/safetensors#format (u64 header length, JSON header, tensor bytes).
"""

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from megatfm.checkpoint import chunked_io, file_io
from megatfm.checkpoint.sharded_tensor import view_as_bytes
from megatfm.errors import MegatfmError
from megatfm.ops.transfer import allocate_aligned

DIRECT_BYTES = 32 * 2**20
"""Files of at least this size are written, and on request read, with O_DIRECT."""

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

# A strict pattern, so that a file name can't contain a path.
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}-[0-9]{3,}\.safetensors$")]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**60)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return name


def _check_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(max(1, size) for size in shape) >= 2**60:  # torch's own arithmetic overflows
        raise ValueError(f"absurd shape {shape}")
    return shape


DType = Annotated[str, AfterValidator(_check_dtype)]
Shape = Annotated[tuple[Count, ...], AfterValidator(_check_size)]


class StrictModel(BaseModel):
    """Base of models read from disk: extra fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(StrictModel):
    """A safetensors file: its size in bytes and the BLAKE3 of its content."""

    bytes: Count
    blake3: Hash


def format_first_error(error: ValidationError) -> str:
    """Format the first validation error on one line: field and fault."""
    first = error.errors()[0]
    value = f", not {first['input']!r:.80}" if isinstance(first["input"], str | int | float) else ""
    location = ".".join(key if (key := str(part)).isprintable() else repr(key) for part in first["loc"])
    return f"{location or 'content':.200}: {first['msg']:.200}{value}"


class _HeaderEntry(StrictModel):
    dtype: DType
    shape: Shape
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _HeaderEntry])


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write the tensors (of any device and stride) into a new file. Equal tensors give equal bytes."""
    direct_io = sum(tensor.nbytes for tensor in tensors.values()) >= DIRECT_BYTES
    block = chunked_io.BLOCK_BYTES if direct_io else 8

    def sort_key(key: str) -> tuple[bool, int, str]:
        """Order tensors of full blocks first, so that they are block-aligned; then by item size, so that all are
        aligned."""
        return direct_io and tensors[key].nbytes % block > 0, -tensors[key].dtype.itemsize, key

    buffers = _iter_file_buffers({key: tensors[key] for key in sorted(tensors, key=sort_key)}, block)
    size, digest = file_io.write_file(path, buffers, direct_io)
    return FileEntry(bytes=size, blake3=digest)


def _iter_file_buffers(tensors: Mapping[str, Tensor], block: int) -> Iterator[memoryview]:
    entries, end = {}, 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % block)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for tensor in tensors.values():
        yield view_as_bytes(tensor.cpu().contiguous()).numpy().data


def read_safetensors(
    path: Path, entry: FileEntry, destinations: Mapping[str, Tensor | None], direct_io: bool = False
) -> dict[str, Tensor]:
    """Return the file's tensors; raises MegatfmError unless the content has its hash.

    destinations: key → tensor to fill in place (it must fit), or None for a new tensor. Other tensors of the file are
    only hashed, and returned as meta tensors. After an error, destinations hold undefined values. direct_io: bypass the
    page cache if the file is large; for files that no other rank of this machine reads.
    """
    with file_io.HashedFile(path, direct_io and entry.bytes >= DIRECT_BYTES) as file:
        if file.size != entry.bytes:
            raise MegatfmError(f"{path} is damaged: it has {file.size} bytes instead of {entry.bytes}")
        problem = None
        try:
            tensors = _read_tensors(file, destinations)
        except ValidationError as error:
            problem = format_first_error(error)
        except (ValueError, struct.error) as error:
            problem = str(error)
        if file.hexdigest() != entry.blake3:
            raise MegatfmError(f"{path} is damaged: its content doesn't have its hash")
    if problem is not None:
        raise MegatfmError(f"{path} is not a safetensors file: {problem}")
    return tensors


def can_read_in_place(destination: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a stored tensor can be read directly into `destination`."""
    fits = destination.dtype == dtype and tuple(destination.shape) == shape
    return fits and destination.device.type == "cpu" and destination.is_contiguous()


def _read_tensors(file: file_io.HashedFile, destinations: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    if file.size < 8:
        raise ValueError(f"it has only {file.size} bytes")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > file.remaining:
        raise ValueError(f"its header claims {length} bytes")
    entries = _HEADER.validate_json(bytes(file.read(length)))
    tensors, position = {}, 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, (start, end) = DTYPES[entry.dtype], entry.data_offsets
        if start != position or end - start > file.remaining or end - start != prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"tensor {key} of shape {entry.shape} has invalid data_offsets {start} to {end}")
        position = end
        if key not in destinations:
            tensors[key] = torch.empty(entry.shape, dtype=dtype, device="meta")
            file.skip(end - start)
            continue
        destination = destinations[key]
        if destination is None or not can_read_in_place(destination, dtype, entry.shape):
            destination = torch.from_numpy(allocate_aligned(end - start)).view(dtype).view(entry.shape)
        tensors[key] = destination
        file.read_into(view_as_bytes(destination).numpy().data)
    return tensors
