"""Where it goes: the store below torch.distributed.checkpoint. No pickle reaches or leaves the disk here."""

import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatfm.checkpoint import disk, metadata, shard
from megatfm.checkpoint.metadata import DTYPE_NAMES, FileEntry, Metadata, Piece, TensorEntry
from megatfm.errors import MegatfmError

log = logging.getLogger("megatfm")

# A rank starts another file when one is full. Small files keep what one hash covers, and a reader holds, small.
FILE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Written:
    """Where a piece went: sent to rank 0, which writes it into the metadata."""

    file: str
    key: str
    entry: FileEntry


class Writer(StorageWriter):
    """Writes one checkpoint: a fresh folder, each rank's files, the metadata, and one rename that makes it real."""

    def __init__(self, folder: Path, step: int, state: dict[str, JsonValue]) -> None:
        self.final = folder / f"step-{step:08d}"
        self.partial: Path | None = None  # known to rank 0 once it is made, to the others with their plan
        self.step = step
        self.state = state

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing to do: rank 0 makes the folder once the plan is known to be sound."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder (rank 0) and tell every rank its own number and where to write."""
        disk.make_folder(self.final.parent)
        self.partial = self.final.with_name(f".{self.final.name}.partial-{secrets.token_hex(4)}")
        with disk.naming("create", self.partial):
            self.partial.mkdir()
        return [replace(plan, storage_data=(rank, self.partial)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files and make them durable."""
        rank, folder = plan.storage_data
        results = []
        for number, items in enumerate(_fill_files(plan.items)):
            file = f"rank-{rank:05d}-{number:03d}.safetensors"
            tensors = {_key(item): _tensor(planner, item) for item in items}
            if len(tensors) < len(items):  # only where a name ends like the slice of another one
                raise MegatfmError(
                    "two pieces would get the same key: rename the tensors that end with [a:b]"
                )
            entry = shard.write(folder / file, tensors)
            results += [
                WriteResult(item.index, tensors[_key(item)].nbytes, Written(file, _key(item), entry))
                for item in items
            ]
        disk.sync_folder(folder)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: PlanMetadata, results: list[list[WriteResult]]) -> None:
        """Commit (rank 0): check what was written, write the metadata, rename."""
        assert self.partial is not None
        commit(self.partial, self.final, self._metadata(metadata, results))

    def _metadata(self, plan: PlanMetadata, results: list[list[WriteResult]]) -> Metadata:
        files: dict[str, FileEntry] = {}
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for result in (result for rank in results for result in rank):
            name, written = result.index.fqn, result.storage_data
            files[written.file] = written.entry
            tensor = plan.state_dict_metadata[name]
            assert isinstance(tensor, TensorStorageMetadata)
            assert result.index.index is not None  # the planner numbers the pieces
            chunk = tensor.chunks[result.index.index]
            pieces[name].append(
                Piece(
                    offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=written.file, key=written.key
                )
            )
        tensors = {}
        for name in sorted(pieces):
            tensor = plan.state_dict_metadata[name]
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = TensorEntry(
                dtype=DTYPE_NAMES[tensor.properties.dtype],
                shape=tuple(tensor.size),
                pieces=tuple(sorted(pieces[name], key=lambda piece: piece.offsets)),
            )
        return Metadata(step=self.step, state=self.state, tensors=tensors, files=dict(sorted(files.items())))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say no: torch may not pick this store by itself."""
        return False


def commit(partial: Path, final: Path, content: Metadata) -> None:
    """Turn a complete partial folder into the checkpoint `final`.

    A whole checkpoint is never replaced: with the same content it stays and the new folder goes; with another
    content the save fails. A damaged one is moved away first.
    """
    check_sizes(partial, content)
    raw = metadata.encode(content)
    disk.write_file(partial / metadata.FILENAME, [memoryview(raw)])
    disk.sync_folder(partial)
    if os.path.lexists(final):
        try:
            existing = verify(final)
        except MegatfmError as error:
            aside = final.with_name(f".{final.name}.damaged-{secrets.token_hex(4)}")
            log.warning("%s; moved to %s and replaced", error, aside)
            disk.rename(final, aside)
        else:
            if metadata.encode(existing) != raw:
                raise MegatfmError(
                    f"{final} already holds another checkpoint of this step: move it away, or use another run "
                    "directory"
                )
            disk.remove_tree(partial)
            return
    disk.rename(partial, final)


def check_sizes(folder: Path, content: Metadata) -> None:
    """Raise unless every file of the checkpoint is there with its number of bytes."""
    for name, entry in content.files.items():
        size = disk.file_size(folder / name)
        if size != entry.bytes:
            raise MegatfmError(f"{folder / name} is damaged: it has {size} bytes instead of {entry.bytes}")


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


def _fill_files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Split pieces into files of at most FILE_BYTES, or of one larger piece, keeping neighbours by name together."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None
        piece = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if file and size + piece > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(item)
        size += piece
    if file:
        yield file


def _key(item: WriteItem) -> str:
    """Name a piece inside its file: the tensor's own name where it is whole, else with the slice that it is."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    slices = (f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{','.join(slices)}]"


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor
