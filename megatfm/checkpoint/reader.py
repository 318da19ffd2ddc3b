"""Load and verify a checkpoint; every file is checked against its hash, and nothing is unpickled."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from megatfm import object_collectives
from megatfm.checkpoint import file_format, file_io
from megatfm.checkpoint.file_format import DTYPE_NAMES
from megatfm.checkpoint.metadata import (
    METADATA_FILENAME,
    Metadata,
    StoredPiece,
    TensorGroup,
    parse_metadata,
    read_metadata,
)
from megatfm.checkpoint.sharded_tensor import Region, ShardedTensor
from megatfm.errors import MegatfmError


def load(path: Path, tensors: Mapping[str, ShardedTensor | Tensor], *, cast: bool = False) -> dict[str, JsonValue]:
    """Fill tensors in place from a checkpoint, and return its `state`. A collective.

    Each rank passes the names and shards that it needs, in any sharding. Every file that a rank reads is checked
    against its hash. cast: convert values of other dtypes.

    Raises MegatfmError on every rank if a name is missing, a shape or dtype differs or a file is damaged; the tensors
    may be filled in part by then.
    """
    action = f"checkpoint {path} not loaded"

    # Rank 0 reads the metadata for all: on other machines the file may become visible later.
    raw = object_collectives.run_on_rank_0(action, lambda: file_io.read_file(path / METADATA_FILENAME))

    def plan() -> Reader:
        metadata, shards = parse_metadata(path, raw), to_sharded_tensors(tensors)
        for name, shard in shards.items():
            _check_request(metadata, name, shard, cast)
        return Reader(path, metadata, shards)

    reader = object_collectives.run_on_all_ranks(action, plan)
    # Other files go through the page cache, so that the disk reads them once for all ranks of a machine.
    exclusive_files = object_collectives.unique_on_host(reader.files)
    timeout = file_io.NFS_VISIBILITY_SECONDS if object_collectives.world_size() > 1 else 0.0
    object_collectives.run_on_all_ranks(action, lambda: reader.fill(timeout, exclusive_files))
    return reader.metadata.state


def read_tensors(path: Path, prefix: str = "", only: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read full tensors to the CPU, in this process alone: names that start with `prefix` (and are in `only`)."""
    metadata = read_metadata(path)
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (dtype, shape) in metadata.tensor_specs().items()
        if name.startswith(prefix) and (only is None or name in only)
    }
    reader = Reader(path, metadata, to_sharded_tensors(tensors))
    reader.fill(exclusive_files=reader.files)
    return tensors


def read_state(path: Path) -> dict[str, JsonValue]:
    """Return the `state` that a checkpoint was saved with."""
    return read_metadata(path).state


def read_tensor_specs(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return every tensor's dtype and global shape by name."""
    return read_metadata(path).tensor_specs()


def check_tensor_names(path: Path, stored: Iterable[str], expected: Iterable[str]) -> None:
    """Raise MegatfmError unless a checkpoint has all tensors of the model that its config describes, and no others."""
    if differing := {*stored} ^ (model_names := {*expected}):
        name = min(differing)
        raise MegatfmError(
            f"{path}: {name} is {'not ' * (name in model_names)}in the checkpoint, but "
            f"{'not ' * (name not in model_names)}in the model that its config describes: open it with the version and "
            "plugins that wrote it"
        )


def to_sharded_tensors(tensors: Mapping[str, ShardedTensor | Tensor]) -> dict[str, ShardedTensor]:
    """Convert plain tensors to sharded tensors with a single shard."""
    return {name: ShardedTensor.from_tensor(tensor) for name, tensor in tensors.items()}


def _check_request(metadata: Metadata, name: str, shard: ShardedTensor, cast: bool) -> None:
    if name not in metadata.group_and_index:
        raise MegatfmError(f"it has no tensor {name}")
    group, _ = metadata.group_and_index[name]
    if group.shape != tuple(shard.global_shape):
        raise MegatfmError(f"tensor {name} has shape {group.shape} there, but {tuple(shard.global_shape)} here")
    if group.torch_dtype != shard.tensor.dtype and not cast:
        requested = DTYPE_NAMES.get(shard.tensor.dtype, str(shard.tensor.dtype))
        raise MegatfmError(f"tensor {name} is {group.dtype} there, but {requested} here: pass cast=True to convert")


class ReadItem(NamedTuple):
    """A block of a stored piece and its target, a view of a shard's memory. offsets: of the block in the piece."""

    piece: StoredPiece
    offsets: tuple[int, ...]
    target: Tensor

    @property
    def is_complete(self) -> bool:
        """Whether the target is filled by the full piece."""
        return tuple(self.target.shape) == self.piece.sizes


class Reader:
    """Fills shards from a committed checkpoint; reads each needed file once and checks its hash."""

    def __init__(self, folder: Path, metadata: Metadata, shards: Mapping[str, ShardedTensor]) -> None:
        self.folder = folder
        self.metadata = metadata
        self._overlaps: dict[tuple[int, Region], list[tuple[int, Region]]] = {}
        self._by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for name, shard in shards.items():
            for block in shard.blocks:
                for item in self._iter_items(name, block):
                    self._by_file[item.piece.file].append(item)

    @property
    def files(self) -> list[str]:
        """Names of the files that are needed, sorted."""
        return sorted(self._by_file)

    def fill(self, timeout: float = 0.0, exclusive_files: Collection[str] = ()) -> None:
        """Fill the shards in place, file by file.

        timeout: seconds for files to become visible on this machine. exclusive_files: files that no other rank on this
        machine reads.
        """
        deadline = time.monotonic() + timeout
        for file in self.files:
            file_io.wait_until_visible(self.folder / file, deadline)
            destinations: dict[str, Tensor | None] = {}
            for item in self._by_file[file]:
                destinations.setdefault(item.piece.key, _get_destination(item))
            tensors = file_format.read_safetensors(
                self.folder / file, self.metadata.files[file], destinations, file in exclusive_files
            )
            for item in self._by_file[file]:
                self._copy(item, tensors)

    def _iter_items(self, name: str, block: ShardedTensor) -> Iterator[ReadItem]:
        """Yield the reads that fill a block."""
        group, name_index = self.metadata.group_and_index[name]
        region = tuple(block.offsets), tuple(block.tensor.shape)
        # Cached: tensors of a group mostly have the same sharding on this rank, too.
        overlaps = self._overlaps.get((id(group), region))
        if overlaps is None:
            overlaps = self._overlaps[id(group), region] = _find_overlaps(group, region)
        for index, (offsets, sizes) in overlaps:
            target = block.tensor.detach()
            piece = group.get_stored_piece(index, name_index, self.metadata.file_names)
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(dim, offset - block.offsets[dim], size)
            offsets_in_piece = tuple(a - b for a, b in zip(offsets, piece.offsets, strict=True))
            yield ReadItem(piece, offsets_in_piece, target)

    def _copy(self, item: ReadItem, tensors: dict[str, Tensor]) -> None:
        source, target = find_piece(self.folder, item.piece, tensors), item.target
        for dim, (offset, size) in enumerate(zip(item.offsets, target.shape, strict=True)):
            source = source.narrow(dim, offset, size)
        if target.data_ptr() != source.data_ptr() or not target.numel():  # unless it was read in place
            target.copy_(source)


def _find_overlaps(group: TensorGroup, region: Region) -> list[tuple[int, Region]]:
    """Return (index, overlap as offsets and sizes) of the pieces of a group's tensors that overlap a region."""
    shape = len(group.pieces), len(group.shape)
    begins = np.array([piece.offsets for piece in group.pieces], np.int64).reshape(shape)
    ends = begins + np.array([piece.sizes for piece in group.pieces], np.int64).reshape(shape)
    offsets, sizes = (np.array(numbers, np.int64) for numbers in region)
    first, last = np.maximum(begins, offsets), np.minimum(ends, offsets + sizes)
    return [
        (int(index), (tuple(first[index].tolist()), tuple((last - first)[index].tolist())))
        for index in np.flatnonzero((first < last).all(1))
    ]


def _get_destination(item: ReadItem) -> Tensor | None:
    """Return the target if the full piece can be read into it in place, else None."""
    piece = item.piece
    fits = item.is_complete and file_format.can_read_in_place(item.target, piece.dtype, piece.sizes)
    return item.target if fits else None


def check_sizes(folder: Path, metadata: Metadata) -> None:
    """Raise MegatfmError unless every file of the checkpoint exists with its size."""
    for name, entry in metadata.files.items():
        size = file_io.get_file_size(folder / name)
        if size != entry.bytes:
            raise MegatfmError(f"{folder / name} is damaged: it has {size} bytes instead of {entry.bytes}")


def verify_checkpoint(folder: Path) -> Metadata:
    """Verify a checkpoint by reading every byte: metadata, sizes, hashes, and the piece keys of each file."""
    metadata = read_metadata(folder)
    check_sizes(folder, metadata)
    verify_files(folder, metadata, metadata.files)
    return metadata


def verify_files(folder: Path, metadata: Metadata, files: Iterable[str], timeout: float = 0.0) -> None:
    """Verify some files of a checkpoint. timeout: seconds for them to become visible on this machine."""
    files = sorted(files)
    by_file: dict[str, list[StoredPiece]] = defaultdict(list)
    for piece in metadata.iter_pieces_in(files):
        by_file[piece.file].append(piece)
    deadline = time.monotonic() + timeout
    for file in files:
        file_io.wait_until_visible(folder / file, deadline)
        tensors = file_format.read_safetensors(folder / file, metadata.files[file], {})
        for piece in by_file[file]:
            find_piece(folder, piece, tensors)


def find_piece(folder: Path, piece: StoredPiece, tensors: dict[str, Tensor]) -> Tensor:
    """Return a piece from the tensors of its file. Raises MegatfmError if it doesn't match the metadata."""
    stored = tensors.get(piece.key)
    if stored is None or stored.dtype != piece.dtype or tuple(stored.shape) != piece.sizes:
        actual = "missing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
        raise MegatfmError(
            f"{folder / piece.file} is not what {METADATA_FILENAME} says: {piece.key} is {actual} instead of "
            f"{piece.dtype} {piece.sizes}"
        )
    return stored
