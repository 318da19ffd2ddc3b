"""Reading below torch.distributed.checkpoint: what the metadata lists, each file under its hash, and no pickle."""

import os
from collections import defaultdict
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatfm.checkpoint import disk, metadata, shard
from megatfm.checkpoint.metadata import Metadata, Piece, TensorEntry
from megatfm.errors import MegatfmError


class Reader(StorageReader):
    """Reads boxes out of a committed checkpoint; each file that is needed is read once and checked by its hash."""

    def __init__(self, folder: Path, content: Metadata) -> None:
        self.folder = folder
        self.content = content
        self.pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, tensor in content.tensors.items()
            for piece in tensor.pieces
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader serves one load."""

    def read_metadata(self) -> PlanMetadata:
        """Return the metadata as torch's planners read it."""
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

    def set_up_storage_reader(self, metadata: PlanMetadata, is_coordinator: bool) -> None:
        """Nothing to do: the metadata came with the constructor."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item of the plan into its place, file by file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.pieces[item.storage_index].file].append(item)
        for file, items in sorted(by_file.items()):
            tensors = shard.read(self.folder / file, self.content.files[file])
            for item in items:
                self._copy(item, tensors, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _copy(self, item: ReadItem, tensors: dict[str, Tensor], planner: LoadPlanner) -> None:
        piece = self.pieces[item.storage_index]
        source = find_piece(self.folder, self.content.tensors[item.storage_index.fqn], piece, tensors)
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, offset, length)
        target = planner.resolve_tensor(item)
        target.copy_(source)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say no: torch may not pick this store by itself."""
        return False


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
    by_file: dict[str, list[tuple[TensorEntry, Piece]]] = defaultdict(list)
    for tensor in content.tensors.values():
        for piece in tensor.pieces:
            by_file[piece.file].append((tensor, piece))
    for file, entry in content.files.items():
        tensors = shard.read(folder / file, entry)
        for tensor, piece in by_file[file]:
            find_piece(folder, tensor, piece, tensors)
    return content


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
