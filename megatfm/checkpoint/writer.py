"""Write a checkpoint: safetensors files of each rank, JSON metadata, and the rename that commits it."""

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from megatfm import object_collectives
from megatfm.checkpoint import file_format, file_io
from megatfm.checkpoint.directory import name_checkpoint, name_staging_dir
from megatfm.checkpoint.file_format import DTYPE_NAMES, FileEntry
from megatfm.checkpoint.metadata import (
    METADATA_FILENAME,
    Metadata,
    NewerFormatError,
    Piece,
    TensorGroup,
    check_json_round_trip,
    encode_metadata,
    encode_runs,
    read_metadata,
)
from megatfm.checkpoint.planner import PlannedGroup, TensorSpec, WriteItem, WritePlan
from megatfm.checkpoint.reader import check_sizes, verify_checkpoint
from megatfm.errors import MegatfmError
from megatfm.files import atomic_write, name_disk_errors
from megatfm.object_collectives import Group

log = logging.getLogger("megatfm")

FILE_BYTES = 512 * 2**20
"""Size at which a rank starts another file: one hash covers a file, and a reader holds one in memory."""


@dataclass(frozen=True)
class WriteResult:
    """Files that one rank has written.

    runs: (group, piece) → runs of (index of a file of this rank, number of consecutive tensors in it).
    """

    files: dict[str, FileEntry]
    runs: dict[tuple[int, int], tuple[tuple[int, int], ...]]


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, JsonValue],
    plan: WritePlan,
    pieces: Callable[[], Mapping[WriteItem, Tensor]],
    *,
    verify_after_write: bool = False,
    group: Group = None,
) -> Path:
    """Write the checkpoint `folder/step-00000100` of every rank's pieces and return its path once it is durable.

    A collective of `group`. folder, step, state: rank 0's count. pieces: returns this rank's tensors.
    verify_after_write: every rank reads its files from disk and checks them before the commit. Raises MegatfmError on
    all ranks if anything fails on any; then no trace of this save is left.
    """
    action = f"checkpoint of step {step} not saved"
    final = folder / name_checkpoint(step)
    created_dir: Path | None = None  # on rank 0, to be removed after an error

    def make_staging_dir() -> Path:
        nonlocal created_dir
        file_io.make_durable_dirs(final.parent)
        created_dir = name_staging_dir(final)
        file_io.make_dir(created_dir)
        return created_dir

    def write() -> WriteResult:
        file_io.wait_until_visible(staging_dir, time.monotonic() + file_io.NFS_VISIBILITY_SECONDS)
        written = write_rank_files(staging_dir, object_collectives.rank(group), plan.items, pieces())
        if verify_after_write:
            _verify_files(staging_dir, written.files)
        return written

    def finish() -> Path:
        metadata = build_metadata(step, state, plan.groups, per_rank)
        deadline = time.monotonic() + file_io.NFS_VISIBILITY_SECONDS
        for name, entry in metadata.files.items():
            if name not in per_rank[0].files:
                file_io.wait_until_size(staging_dir / name, entry.bytes, deadline)
        commit(staging_dir, final, metadata)
        return final

    try:
        staging_dir = object_collectives.run_on_rank_0(action, make_staging_dir, group)
        per_rank = object_collectives.run_and_gather(action, write, group)
        return object_collectives.run_on_rank_0(action, finish, group)
    except MegatfmError as error:
        if created_dir is not None:
            file_io.remove_unfinished(created_dir, error)
        raise


def write_rank_files(
    folder: Path, rank: int, items: Sequence[WriteItem], pieces: Mapping[WriteItem, Tensor]
) -> WriteResult:
    """Write one rank's files and make them durable. Raises MegatfmError if two pieces have the same key."""
    files: dict[str, FileEntry] = {}
    file_indices: dict[tuple[int, int], list[int]] = defaultdict(list)
    for file_index, file_items in enumerate(_split_into_files(items)):
        file = f"rank-{rank:05d}-{file_index:03d}.safetensors"
        tensors = {item.key: pieces[item] for item in file_items}
        if len(tensors) < len(file_items):  # a tensor's name ends like a slice of another one
            raise MegatfmError("two pieces would get the same key: rename the tensors that end with [a:b]")
        files[file] = file_format.write_safetensors(folder / file, tensors)
        for item in file_items:
            file_indices[item.group, item.piece].append(file_index)
    file_io.sync_folder(folder)
    return WriteResult(files, {piece: encode_runs(indices) for piece, indices in file_indices.items()})


def build_metadata(
    step: int, state: dict[str, JsonValue], plan: Sequence[PlannedGroup], per_rank: Sequence[WriteResult]
) -> Metadata:
    """Build the metadata of the files that all ranks have written."""
    files = dict(sorted((name, entry) for written in per_rank for name, entry in written.files.items()))
    file_index = {name: i for i, name in enumerate(files)}
    indices_of_rank = [[file_index[name] for name in sorted(written.files)] for written in per_rank]
    groups = []
    for group_index, group in enumerate(plan):
        pieces = []
        for piece_index, piece in enumerate(group.pieces):
            runs = [
                (indices_of_rank[rank][local_index], count)
                for rank, _ in piece.writers
                for local_index, count in per_rank[rank].runs[group_index, piece_index]
            ]
            pieces.append(Piece(offsets=piece.region[0], sizes=piece.region[1], runs=tuple(runs)))
        dtype, shape = group.spec
        groups.append(TensorGroup(dtype=dtype, shape=shape, names=group.names, pieces=tuple(pieces)))
    return Metadata(step=step, state=state, groups=tuple(groups), files=files)


def commit(staging_dir: Path, final: Path, metadata: Metadata) -> None:
    """Rename a complete staging folder to the checkpoint `final`.

    An intact checkpoint is never replaced: if its content is equal, the staging folder is removed; else the save fails.
    A damaged one is moved aside first.
    """
    check_sizes(staging_dir, metadata)
    raw = encode_metadata(metadata)
    file_io.write_file(staging_dir / METADATA_FILENAME, [memoryview(raw)])
    file_io.sync_folder(staging_dir)
    if os.path.lexists(final):
        try:
            existing = verify_checkpoint(final)
        except NewerFormatError:
            raise
        except MegatfmError as error:
            damaged = final.with_name(f".{final.name}.damaged-{secrets.token_hex(4)}")
            log.warning("%s; moved to %s and replaced", error, damaged)
            file_io.rename(final, damaged)
        else:
            if encode_metadata(existing) != raw:
                raise MegatfmError(
                    f"{final} already holds another checkpoint of this step: move it away, or use another run directory"
                )
            file_io.remove_tree(staging_dir)
            return
    file_io.rename(staging_dir, final)


def update_state(path: Path, changes: Mapping[str, JsonValue]) -> None:
    """Change keys of a committed checkpoint's state (None: remove the key), at once, and leave the tensors as they are.

    Raises MegatfmError.
    """
    metadata = read_metadata(path)
    state = {key: value for key, value in {**metadata.state, **changes}.items() if changes.get(key, "") is not None}
    changed = metadata.model_copy(update={"state": check_json_round_trip(state)})
    with name_disk_errors("write", path / METADATA_FILENAME):
        atomic_write(path / METADATA_FILENAME, encode_metadata(changed))


def _verify_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Read files from disk, bypassing the page cache. Raises MegatfmError if their hashes differ."""
    for name, entry in files.items():
        file_io.drop_page_cache(folder / name)
        file_format.read_safetensors(folder / name, entry, {}, True)


def _split_into_files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Split pieces, in order, into files of at most FILE_BYTES (or of a single larger piece)."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        if file and size + item.nbytes > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(item)
        size += item.nbytes
    if file:
        yield file


def write_checkpoint_from_iterator(
    folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]], state: Mapping[str, JsonValue]
) -> Path:
    """Write the checkpoint `folder/step-00000100` of full tensors in one process, holding one file's tensors in
    memory at a time, and return its path once it is durable.

    Names must be unique. Raises MegatfmError if anything fails; then no trace of this save is left.
    """
    final = folder / name_checkpoint(step)
    file_io.make_durable_dirs(folder)
    staging_dir = name_staging_dir(final)
    file_io.make_dir(staging_dir)
    try:
        groups, files = _write_full_tensors(staging_dir, tensors)
        metadata = Metadata(step=step, state=check_json_round_trip(state), groups=groups, files=files)
        commit(staging_dir, final, metadata)
    except BaseException as error:
        file_io.remove_unfinished(staging_dir, error)
        raise
    return final


def _write_full_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[tuple[TensorGroup, ...], dict[str, FileEntry]]:
    file_indices: dict[TensorSpec, dict[str, int]] = defaultdict(dict)  # spec → name → index of its file
    files: dict[str, FileEntry] = {}
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending:
            file = f"rank-00000-{len(files):03d}.safetensors"
            for name, tensor in pending.items():
                file_indices[DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)][name] = len(files)
            files[file] = file_format.write_safetensors(folder / file, pending)
            pending.clear()

    for name, tensor in tensors:
        if sum(pending_tensor.nbytes for pending_tensor in pending.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        pending[name] = tensor
    flush()
    groups = [_make_full_group(spec, dict(sorted(indices.items()))) for spec, indices in file_indices.items()]
    return tuple(sorted(groups, key=lambda group: group.names[0])), files


def _make_full_group(spec: TensorSpec, file_indices: Mapping[str, int]) -> TensorGroup:
    """Return a group of full tensors. file_indices: name → index of its file, sorted by name."""
    dtype, shape = spec
    piece = Piece(offsets=(0,) * len(shape), sizes=shape, runs=encode_runs(file_indices.values()))
    return TensorGroup(dtype=dtype, shape=shape, names=tuple(file_indices), pieces=(piece,))
