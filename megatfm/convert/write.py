"""Writing a folder in the Hugging Face format, tensor by tensor."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatfm.checkpoint import disk
from megatfm.checkpoint.metadata import DTYPE_NAMES
from megatfm.convert.folder import INDEX, WEIGHTS
from megatfm.convert.table import WeightMapping, to_hf

Read = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Our tensors of some names."""


def write_weights(
    folder: Path, rules: Sequence[WeightMapping], ours: Mapping[str, Tensor], read: Read, shard_bytes: int
) -> int:
    """Write the tensors that `rules` make, into files of at most `shard_bytes` (or one larger tensor); returns bytes.

    ours: every tensor on the meta device, from which the layout of the files follows before anything is read.
    """
    theirs = to_hf(rules, ours)
    shards = split(theirs, shard_bytes)
    total = len(shards)
    names = [WEIGHTS] if total == 1 else [_file(number, total) for number in range(1, total + 1)]
    tensors = _made(rules, read)
    for name, shard in zip(names, shards, strict=True):
        disk.write_file(folder / name, _parts({key: theirs[key] for key in shard}, tensors))
    size = sum(tensor.nbytes for tensor in theirs.values())
    if total > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    return size


def split(theirs: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in their order, so many a file as fit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in theirs.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a new JSON file and sync it."""
    disk.write_file(path, [memoryview((json.dumps(content, indent=2) + "\n").encode())])


def _made(rules: Sequence[WeightMapping], read: Read) -> Iterator[Tensor]:
    for rule in rules:
        yield from to_hf([rule], read(rule.megatfm)).values()


def _parts(layout: Mapping[str, Tensor], tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    """Header and data of a safetensors file (the format is in `checkpoint.shard`), tensors read on the way."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in layout.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for planned in layout.values():
        tensor = next(tensors)
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype)
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _file(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"
