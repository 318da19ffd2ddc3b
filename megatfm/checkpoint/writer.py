"""Writing a checkpoint: each rank's safetensors files, the JSON metadata, and one rename that makes it real."""

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megatfm import ranks
from megatfm.checkpoint import disk, metadata, shard
from megatfm.checkpoint.metadata import DTYPE_NAMES, FileEntry, Metadata, NewerFormatError, Piece, TensorEntry
from megatfm.checkpoint.planner import item_bytes
from megatfm.checkpoint.reader import check_sizes, verify
from megatfm.checkpoint.share import WritePlan
from megatfm.errors import MegatfmError
from megatfm.ranks import Group

log = logging.getLogger("megatfm")

# A rank starts another file when one is full. Small files keep what one hash covers, and a reader holds, small.
FILE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class WriteResult:
    """What one rank has put on the disk."""

    files: dict[str, FileEntry]
    entries: list[tuple[str, Piece]]
    """By the name of the tensor that they belong to."""


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, JsonValue],
    share: WritePlan,
    pieces: Callable[[], Mapping[MetadataIndex, Tensor]],
    *,
    read_back: bool = False,
    group: Group = None,
) -> Path:
    """Write the checkpoint `folder/step-00000100` of every rank's pieces and return its path once it is durable.

    A collective of `group`. `folder`, `step` and `state` are rank 0's. verify_after_write: every rank reads its
    files from
    the disk again before the checkpoint gets its name. Raises MegatfmError on all ranks if anything fails on any;
    then no trace of this save is left.
    """
    what = f"checkpoint of step {step} not saved"
    final = folder / f"step-{step:08d}"
    draft: Path | None = None  # known to all once it is made; here, so that rank 0 can remove it

    def make_draft() -> Path:
        nonlocal draft
        disk.make_durable_dirs(final.parent)
        draft = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
        disk.make_dir(draft)
        return draft

    def write() -> WriteResult:
        disk.wait_until_visible(partial, time.monotonic() + disk.NFS_VISIBILITY_SECONDS)
        written = write_rank_files(partial, ranks.rank(group), share.items, pieces())
        if read_back:
            _read_back(partial, written.files)
        return written

    def finish() -> Path:
        assert share.global_metadata is not None
        content = build_metadata(step, state, share.global_metadata, per_rank)
        deadline = time.monotonic() + disk.NFS_VISIBILITY_SECONDS
        for name, entry in content.files.items():
            if name not in per_rank[0].files:
                disk.wait_until_size(partial / name, entry.bytes, deadline)
        commit(partial, final, content)
        return final

    try:
        partial = ranks.run_on_rank_0(what, make_draft, group)
        per_rank = ranks.run_and_gather(what, write, group)
        return ranks.run_on_rank_0(what, finish, group)
    except MegatfmError as error:
        _discard(draft, error)
        raise


def write_rank_files(
    folder: Path, rank: int, items: Sequence[WriteItem], pieces: Mapping[MetadataIndex, Tensor]
) -> WriteResult:
    """Write one rank's files and make them durable."""
    written = WriteResult({}, [])
    for number, chosen in enumerate(_fill_files(items)):
        file = f"rank-{rank:05d}-{number:03d}.safetensors"
        tensors = {_key(item): pieces[item.index] for item in chosen}
        if len(tensors) < len(chosen):  # only where a name ends like the slice of another one
            raise MegatfmError("two pieces would get the same key: rename the tensors that end with [a:b]")
        written.files[file] = shard.write(folder / file, tensors)
        written.entries.extend((item.index.fqn, _piece(item, file)) for item in chosen)
    disk.sync_folder(folder)
    return written


def build_metadata(
    step: int, state: dict[str, JsonValue], plan: PlanMetadata, per_rank: Sequence[WriteResult]
) -> Metadata:
    """The metadata of what all ranks have written."""
    files: dict[str, FileEntry] = {}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for written in per_rank:
        files.update(written.files)
        for name, piece in written.entries:
            pieces[name].append(piece)
    tensors = {}
    for name in sorted(pieces):
        tensor = plan.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        tensors[name] = TensorEntry(
            dtype=DTYPE_NAMES[tensor.properties.dtype],
            shape=tuple(tensor.size),
            pieces=tuple(sorted(pieces[name], key=lambda piece: piece.offsets)),
        )
    return Metadata(step=step, state=state, tensors=tensors, files=dict(sorted(files.items())))


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
        except NewerFormatError:
            raise
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


def _read_back(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise unless the disk gives back what it was given."""
    for name, entry in files.items():
        disk.forget(folder / name)
        shard.read(folder / name, entry, {}, True)


def _discard(partial: Path | None, error: MegatfmError) -> None:
    """Remove the folder of a save that failed (only rank 0 knows it); the first error stays the one to report."""
    if partial is not None and partial.exists():
        try:
            disk.remove_tree(partial)
        except MegatfmError as second:
            error.add_note(f"{second}: `clean` will remove it")


def _fill_files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
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


def _piece(item: WriteItem, file: str) -> Piece:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Piece(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=file, key=_key(item))
