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

from megatfm.checkpoint import disk
from megatfm.checkpoint.metadata import DTYPE_NAMES, DTYPES, Count, DType, FileEntry, Part, Shape, explain
from megatfm.errors import MegatfmError


class _Entry(Part):
    dtype: DType
    shape: Shape
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write the tensors (of any device and stride) into a new file. Equal tensors give equal bytes."""
    # Wide types first, so that every tensor is aligned to its type, as the library orders them.
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    size, digest = disk.write_file(path, _parts({key: tensors[key] for key in order}))
    return FileEntry(bytes=size, blake3=digest)


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    entries, end = {}, 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read(path: Path, entry: FileEntry) -> dict[str, Tensor]:
    """Return the file's tensors, views of one buffer; raises MegatfmError unless the content has its hash."""
    size = disk.file_size(path)
    if size != entry.bytes:
        raise MegatfmError(f"{path} is damaged: it has {size} bytes instead of {entry.bytes}")
    content, digest = disk.read_hashed(path)
    if digest != entry.blake3:
        raise MegatfmError(f"{path} is damaged: its content doesn't have its hash")
    try:
        return _views(content)
    except ValidationError as error:
        raise MegatfmError(f"{path} is not a safetensors file: {explain(error)}") from error
    except (ValueError, struct.error) as error:
        raise MegatfmError(f"{path} is not a safetensors file: {error}") from error


def _views(content: memoryview) -> dict[str, Tensor]:
    (length,) = struct.unpack_from("<Q", content)
    data = 8 + length
    if data > len(content):
        raise ValueError(f"its header claims {length} bytes")
    views = {}
    for key, entry in _HEADER.validate_json(bytes(content[8:data])).items():
        dtype, (start, end) = DTYPES[entry.dtype], entry.data_offsets
        if end > len(content) - data or end - start != prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"tensor {key} of shape {entry.shape} is said to lie at {start} to {end}")
        if start == end:  # frombuffer refuses to make an empty one
            views[key] = torch.empty(entry.shape, dtype=dtype)
        else:
            flat = torch.frombuffer(content, dtype=dtype, count=prod(entry.shape), offset=data + start)
            views[key] = flat.reshape(entry.shape)
    return views
