"""Loading and verifying a checkpoint: tensors that the metadata lists, each file under its hash, and no pickle."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megatfm import object_collectives
from megatfm.checkpoint import file_format, file_io
from megatfm.checkpoint.file_format import DTYPE_NAMES, Metadata, Piece, TensorEntry
from megatfm.checkpoint.planner import LoadPlanner
from megatfm.checkpoint.sharded_tensor import ShardedTensor
from megatfm.errors import MegatfmError


def load(
    path: Path, tensors: Mapping[str, ShardedTensor | Tensor], *, cast: bool = False
) -> dict[str, JsonValue]:
    """Fill the given tensors in place from a checkpoint, on all ranks together, and return its `state`.

    Each rank passes the names and shards that it wants, cut however it needs them. Every file that a rank reads
    is checked against its hash. Values are converted to another dtype only with `cast`.

    Raises MegatfmError on every rank if a name is missing, a shape or dtype differs or a file is damaged; the
    tensors may be filled in part by then.
    """
    action = f"checkpoint {path} not loaded"

    # Rank 0 sees what is there and tells the others, whose machines may see it later.
    raw = object_collectives.run_on_rank_0(
        action, lambda: file_io.read_file(path / file_format.METADATA_FILENAME)
    )

    def plan() -> Reader:
        content, shards = file_format.parse_metadata(path, raw), to_sharded_tensors(tensors)
        for name, shard in shards.items():
            _check_request(content, name, shard, cast)
        return Reader(path, content, shards)

    reader = object_collectives.run_on_all_ranks(action, plan)
    # What several ranks of a machine read comes from the disk once, and for the others out of the page cache.
    exclusive_files = object_collectives.unique_on_host(reader.files)
    timeout = file_io.NFS_VISIBILITY_SECONDS if object_collectives.world_size() > 1 else 0.0
    object_collectives.run_on_all_ranks(action, lambda: reader.fill(timeout, exclusive_files))
    return reader.content.state


def read_tensors(path: Path, prefix: str = "", only: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, or `only` some, whole, on the CPU of this process alone."""
    content = file_format.read_metadata(path)
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.torch_dtype)
        for name, entry in content.tensors.items()
        if name.startswith(prefix) and (only is None or name in only)
    }
    reader = Reader(path, content, to_sharded_tensors(tensors))
    reader.fill(exclusive_files=reader.files)
    return tensors


def read_state(path: Path) -> dict[str, JsonValue]:
    """Return the `state` that a checkpoint was saved with."""
    return file_format.read_metadata(path).state


def names(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return every tensor's dtype and global shape by name."""
    return file_format.read_metadata(path).names()


def to_sharded_tensors(tensors: Mapping[str, ShardedTensor | Tensor]) -> dict[str, ShardedTensor]:
    """Return every tensor as a sharded tensor, a plain one as a single shard."""
    return {name: ShardedTensor.from_tensor(tensor) for name, tensor in tensors.items()}


def _check_request(content: Metadata, name: str, shard: ShardedTensor, cast: bool) -> None:
    entry = content.tensors.get(name)
    if entry is None:
        raise MegatfmError(f"it has no tensor {name}")
    if entry.shape != tuple(shard.global_shape):
        raise MegatfmError(
            f"tensor {name} has shape {entry.shape} there, but {tuple(shard.global_shape)} here"
        )
    if entry.torch_dtype != shard.tensor.dtype and not cast:
        model = DTYPE_NAMES.get(shard.tensor.dtype, str(shard.tensor.dtype))
        raise MegatfmError(
            f"tensor {name} is {entry.dtype} there, but {model} here: pass cast=True to convert"
        )


class Reader:
    """Fills shards out of a committed checkpoint; each file that is needed is read once and checked by its hash."""

    def __init__(self, folder: Path, content: Metadata, shards: Mapping[str, ShardedTensor]) -> None:
        self.folder = folder
        self.content = content
        self.pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, tensor in content.tensors.items()
            for piece in tensor.pieces
        }
        self._planner = LoadPlanner()
        self._planner.set_up_planner(dict(shards), self._plan_metadata())
        self._by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in self._planner.create_local_plan().items:
            self._by_file[self.pieces[item.storage_index].file].append(item)

    @property
    def files(self) -> list[str]:
        """Names of the files that are needed, sorted."""
        return sorted(self._by_file)

    def fill(self, timeout: float = 0.0, exclusive_files: Collection[str] = ()) -> None:
        """Fill the shards in place, file by file.

        timeout: seconds for files to become visible on this machine. exclusive_files: those that no other rank here
        reads."""
        deadline = time.monotonic() + timeout
        for file in self.files:
            file_io.wait_until_visible(self.folder / file, deadline)
            destinations: dict[str, Tensor | None] = {}
            for item in self._by_file[file]:
                destinations.setdefault(self.pieces[item.storage_index].key, self._destination(item))
            tensors = file_format.read_safetensors(
                self.folder / file, self.content.files[file], destinations, file in exclusive_files
            )
            for item in self._by_file[file]:
                self._copy(item, tensors)

    def _destination(self, item: ReadItem) -> Tensor | None:
        """Return the tensor that a piece can be read into in place, if it is wanted as a whole and fits."""
        tensor, piece = self.content.tensors[item.storage_index.fqn], self.pieces[item.storage_index]
        target = self._planner.resolve_tensor(item).detach()
        is_complete = tuple(item.lengths) == piece.sizes
        return (
            target
            if is_complete and file_format.can_read_in_place(target, tensor.torch_dtype, piece.sizes)
            else None
        )

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
        size = file_io.file_size(folder / name)
        if size != entry.bytes:
            raise MegatfmError(f"{folder / name} is damaged: it has {size} bytes instead of {entry.bytes}")


def verify(folder: Path) -> Metadata:
    """Read every byte of a checkpoint: metadata, sizes, hashes, and that each piece lies where it is said to."""
    content = file_format.read_metadata(folder)
    check_sizes(folder, content)
    verify_files(folder, content, content.files)
    return content


def verify_files(folder: Path, content: Metadata, files: Iterable[str], timeout: float = 0.0) -> None:
    """Verify some of its files. timeout: seconds for them to become visible on this machine."""
    by_file: dict[str, list[tuple[TensorEntry, Piece]]] = defaultdict(list)
    for tensor in content.tensors.values():
        for piece in tensor.pieces:
            by_file[piece.file].append((tensor, piece))
    deadline = time.monotonic() + timeout
    for file in files:
        file_io.wait_until_visible(folder / file, deadline)
        tensors = file_format.read_safetensors(folder / file, content.files[file], {})
        for tensor, piece in by_file[file]:
            find_piece(folder, tensor, piece, tensors)


def find_piece(folder: Path, tensor: TensorEntry, piece: Piece, tensors: dict[str, Tensor]) -> Tensor:
    """Return a piece among the tensors of its file; raise if it isn't there as the metadata has it."""
    stored = tensors.get(piece.key)
    if stored is None or stored.dtype != tensor.torch_dtype or tuple(stored.shape) != piece.sizes:
        what = "missing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
        raise MegatfmError(
            f"{folder / piece.file} is not what {file_format.METADATA_FILENAME} says: {piece.key} is {what} instead of "
            f"{tensor.torch_dtype} {piece.sizes}"
        )
    return stored
