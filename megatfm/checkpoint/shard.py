"""One safetensors file: written as a stream with its hash, read whole and believed only under that hash.

The safetensors library would read and write the same files, but it holds a second copy of the tensors while it
serialises, and it hands out memory maps, in which a file that shrinks kills the process instead of raising.
Format: https://github.com/huggingface/safetensors#format (u64 header length, JSON header, tensor bytes).
"""

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from megatfm.checkpoint import disk, flow
from megatfm.checkpoint.metadata import (
    DTYPE_NAMES,
    DTYPES,
    Count,
    DType,
    FileEntry,
    Shape,
    StrictModel,
    first_error,
)
from megatfm.errors import MegatfmError
from megatfm.ops.aligned import aligned_bytes

DIRECT_BYTES = 32 * 2**20
"""Files from here on are written, and on demand read, past the page cache."""


class _Entry(StrictModel):
    dtype: DType
    shape: Shape
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write the tensors (of any device and stride) into a new file. Equal tensors give equal bytes."""
    direct_io = sum(tensor.nbytes for tensor in tensors.values()) >= DIRECT_BYTES
    block = flow.BLOCK_BYTES if direct_io else 8

    def place(key: str) -> tuple[bool, int, str]:
        """Whole blocks first, which then lie at blocks; then wide types, so that each is aligned to its type."""
        return direct_io and tensors[key].nbytes % block > 0, -tensors[key].dtype.itemsize, key

    parts = _parts({key: tensors[key] for key in sorted(tensors, key=place)}, block)
    size, digest = disk.write_file(path, parts, direct_io)
    return FileEntry(bytes=size, blake3=digest)


def _parts(tensors: Mapping[str, Tensor], block: int) -> Iterator[memoryview]:
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


def read(
    path: Path, entry: FileEntry, destinations: Mapping[str, Tensor | None], direct_io: bool = False
) -> dict[str, Tensor]:
    """Return the file's tensors; raises MegatfmError unless the content has its hash.

    Those that have a place are read right into it (it must fit), those that have None into memory of their own; of
    the others, which are only hashed, a meta tensor tells type and shape. After an error a place may hold anything.
    direct_io: past the page cache if the file is large, for one that nobody else on this machine reads.
    """
    with disk.HashedFile(path, direct_io and entry.bytes >= DIRECT_BYTES) as file:
        if file.size != entry.bytes:
            raise MegatfmError(f"{path} is damaged: it has {file.size} bytes instead of {entry.bytes}")
        problem = None
        try:
            tensors = _read(file, destinations)
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
    """Whether a file's tensor can be read right into a place."""
    return (
        destination.dtype == dtype and tuple(destination.shape) == shape and destination.device.type == "cpu"
    ) and destination.is_contiguous()


def _read(file: disk.HashedFile, destinations: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    if file.size < 8:
        raise ValueError(f"it has only {file.size} bytes")
    (length,) = struct.unpack("<Q", file.take(8))
    if length > file.left:
        raise ValueError(f"its header claims {length} bytes")
    entries = _HEADER.validate_json(bytes(file.take(length)))
    tensors, at = {}, 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, (start, end) = DTYPES[entry.dtype], entry.data_offsets
        if start != at or end - start > file.left or end - start != prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"tensor {key} of shape {entry.shape} is said to lie at {start} to {end}")
        at = end
        if key not in destinations:
            tensors[key] = torch.empty(entry.shape, dtype=dtype, device="meta")
            file.skip(end - start)
            continue
        destination = destinations[key]
        direct_io = destination is not None and can_read_in_place(destination, dtype, entry.shape)
        tensors[key] = (
            destination if destination is not None and direct_io else _empty_aligned(entry.shape, dtype)
        )
        file.read_into(_bytes(tensors[key]))
    return tensors


def _empty_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor."""
    return torch.from_numpy(aligned_bytes(prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
