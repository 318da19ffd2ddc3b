"""Reading a checkpoint: what the metadata lists, each file under its hash, and no pickle."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megatfm.checkpoint import disk, metadata, shard
from megatfm.checkpoint.box import ShardedTensor
from megatfm.checkpoint.metadata import Metadata, Piece, TensorEntry
from megatfm.checkpoint.planner import LoadPlanner
from megatfm.errors import MegatfmError


class Reader:
    """Fills boxes out of a committed checkpoint; each file that is needed is read once and checked by its hash."""

    def __init__(self, folder: Path, content: Metadata, boxes: Mapping[str, ShardedTensor]) -> None:
        self.folder = folder
        self.content = content
        self.pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, tensor in content.tensors.items()
            for piece in tensor.pieces
        }
        self._planner = LoadPlanner()
        self._planner.set_up_planner(dict(boxes), self._plan_metadata())
        self._by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in self._planner.create_local_plan().items:
            self._by_file[self.pieces[item.storage_index].file].append(item)

    @property
    def files(self) -> list[str]:
        """Names of the files that are needed, sorted."""
        return sorted(self._by_file)

    def fill(self, patience: float = 0.0, alone: Collection[str] = ()) -> None:
        """Fill the boxes in place, file by file.

        patience: seconds for files to come to be seen on this machine. alone: the files that nobody else reads on it.
        """
        deadline = time.monotonic() + patience
        for file in self.files:
            disk.wait_until_visible(self.folder / file, deadline)
            destinations: dict[str, Tensor | None] = {}
            for item in self._by_file[file]:
                destinations.setdefault(self.pieces[item.storage_index].key, self._place(item))
            tensors = shard.read(self.folder / file, self.content.files[file], destinations, file in alone)
            for item in self._by_file[file]:
                self._copy(item, tensors)

    def _place(self, item: ReadItem) -> Tensor | None:
        """Where a piece that is wanted whole goes, if it can be read right into there."""
        tensor, piece = self.content.tensors[item.storage_index.fqn], self.pieces[item.storage_index]
        target = self._planner.resolve_tensor(item).detach()
        whole = tuple(item.lengths) == piece.sizes
        return target if whole and shard.can_read_in_place(target, tensor.torch_dtype, piece.sizes) else None

    def _plan_metadata(self) -> PlanMetadata:
        """The metadata as torch's planners read it."""
        return PlanMetadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.torch_dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in tensor.pieces
                    ],
                )
                for name, tensor in self.content.tensors.items()
            }
        )

    def _copy(self, item: ReadItem, tensors: dict[str, Tensor]) -> None:
        piece = self.pieces[item.storage_index]
        source = find_piece(self.folder, self.content.tensors[item.storage_index.fqn], piece, tensors)
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, offset, length)
        target = self._planner.resolve_tensor(item).detach()
        if target.data_ptr() != source.data_ptr() or not target.numel():  # else it was read there
            target.copy_(source)


def check_sizes(folder: Path, content: Metadata) -> None:
    """Raise unless every file of the checkpoint is there with its number of bytes."""
    for name, entry in content.files.items():
        size = disk.file_size(folder / name)
        if size != entry.bytes:
            raise MegatfmError(f"{folder / name} is damaged: it has {size} bytes instead of {entry.bytes}")


def verify(folder: Path) -> Metadata:
    """Read every byte of a checkpoint: metadata, sizes, hashes, and that each piece lies where it is said to."""
    content = metadata.read(folder)
    check_sizes(folder, content)
    verify_files(folder, content, content.files)
    return content


def verify_files(folder: Path, content: Metadata, files: Iterable[str], patience: float = 0.0) -> None:
    """The same for some of its files. patience: seconds for them to come to be seen on this machine."""
    by_file: dict[str, list[tuple[TensorEntry, Piece]]] = defaultdict(list)
    for tensor in content.tensors.values():
        for piece in tensor.pieces:
            by_file[piece.file].append((tensor, piece))
    deadline = time.monotonic() + patience
    for file in files:
        disk.wait_until_visible(folder / file, deadline)
        tensors = shard.read(folder / file, content.files[file], {})
        for tensor, piece in by_file[file]:
            find_piece(folder, tensor, piece, tensors)


def find_piece(folder: Path, tensor: TensorEntry, piece: Piece, tensors: dict[str, Tensor]) -> Tensor:
    """Return a piece among the tensors of its file; raise if it isn't there as the metadata has it."""
    found = tensors.get(piece.key)
    if found is None or found.dtype != tensor.torch_dtype or tuple(found.shape) != piece.sizes:
        what = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise MegatfmError(
            f"{folder / piece.file} is not what {metadata.FILENAME} says: {piece.key} is {what} instead of "
            f"{tensor.torch_dtype} {piece.sizes}"
        )
    return found
