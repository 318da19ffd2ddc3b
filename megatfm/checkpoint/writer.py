"""Writing below torch.distributed.checkpoint: safetensors files, JSON metadata, and one rename that makes it real."""

import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatfm.checkpoint import disk, metadata, shard
from megatfm.checkpoint.metadata import DTYPE_NAMES, FileEntry, Metadata, Piece, TensorEntry
from megatfm.checkpoint.planner import item_bytes
from megatfm.checkpoint.reader import check_sizes, verify
from megatfm.errors import MegatfmError

log = logging.getLogger("megatfm")

# A rank starts another file when one is full. Small files keep what one hash covers, and a reader holds, small.
FILE_BYTES = 512 * 2**20


class Writer(StorageWriter):
    """Writes one checkpoint: a fresh folder, each rank's files, the metadata, and one rename that makes it real."""

    def __init__(self, folder: Path, step: int, state: dict[str, JsonValue]) -> None:
        self.final = folder / f"step-{step:08d}"
        self.partial: Path | None = None  # on rank 0, once it is made; the others get it with their plan
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
            results += [_result(item, file, entry) for item in items]
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
            piece, entry = result.storage_data
            files[piece.file] = entry
            pieces[result.index.fqn].append(piece)
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


def _fill_files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Split pieces into files of at most FILE_BYTES, or of one larger piece, keeping neighbours by name together."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        if file and size + item_bytes(item) > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(item)
        size += item_bytes(item)
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


def _result(item: WriteItem, file: str, entry: FileEntry) -> WriteResult:
    """Say where a piece went: rank 0 gathers these for the metadata."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    piece = Piece(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=file, key=_key(item))
    return WriteResult(item.index, item_bytes(item), (piece, entry))


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor
