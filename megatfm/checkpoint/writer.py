"""Writing a checkpoint: each rank's safetensors files, the JSON metadata, and one rename that makes it real."""

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
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megatfm import object_collectives
from megatfm.checkpoint import file_format, file_io
from megatfm.checkpoint.file_format import (
    DTYPE_NAMES,
    FileEntry,
    Metadata,
    NewerFormatError,
    Piece,
    TensorEntry,
)
from megatfm.checkpoint.planner import WritePlan, item_bytes
from megatfm.checkpoint.reader import check_sizes, verify
from megatfm.errors import MegatfmError
from megatfm.object_collectives import Group

log = logging.getLogger("megatfm")

# A rank starts another file when one is full. Small files keep what one hash covers, and a reader holds, small.
FILE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class WriteResult:
    """Files and pieces that one rank has written."""

    files: dict[str, FileEntry]
    entries: list[tuple[str, Piece]]
    """Tensor name → piece."""


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, JsonValue],
    plan: WritePlan,
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
    action = f"checkpoint of step {step} not saved"
    final = folder / f"step-{step:08d}"
    own_staging_dir: Path | None = None  # rank 0's, to be removed after an error

    def make_staging_dir() -> Path:
        nonlocal own_staging_dir
        file_io.make_durable_dirs(final.parent)
        own_staging_dir = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
        file_io.make_dir(own_staging_dir)
        return own_staging_dir

    def write() -> WriteResult:
        file_io.wait_until_visible(staging_dir, time.monotonic() + file_io.NFS_VISIBILITY_SECONDS)
        written = write_rank_files(staging_dir, object_collectives.rank(group), plan.items, pieces())
        if read_back:
            _read_back(staging_dir, written.files)
        return written

    def finish() -> Path:
        assert plan.global_metadata is not None
        content = build_metadata(step, state, plan.global_metadata, per_rank)
        deadline = time.monotonic() + file_io.NFS_VISIBILITY_SECONDS
        for name, entry in content.files.items():
            if name not in per_rank[0].files:
                file_io.wait_until_size(staging_dir / name, entry.bytes, deadline)
        commit(staging_dir, final, content)
        return final

    try:
        staging_dir = object_collectives.run_on_rank_0(action, make_staging_dir, group)
        per_rank = object_collectives.run_and_gather(action, write, group)
        return object_collectives.run_on_rank_0(action, finish, group)
    except MegatfmError as error:
        _discard(own_staging_dir, error)
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
        written.files[file] = file_format.write_safetensors(folder / file, tensors)
        written.entries.extend((item.index.fqn, _piece(item, file)) for item in chosen)
    file_io.sync_folder(folder)
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


def commit(staging_dir: Path, final: Path, content: Metadata) -> None:
    """Turn a complete staging_dir folder into the checkpoint `final`.

    A whole checkpoint is never replaced: with the same content it stays and the new folder goes; with another
    content the save fails. A damaged one is moved away first.
    """
    check_sizes(staging_dir, content)
    raw = file_format.encode_metadata(content)
    file_io.write_file(staging_dir / file_format.METADATA_FILENAME, [memoryview(raw)])
    file_io.sync_folder(staging_dir)
    if os.path.lexists(final):
        try:
            existing = verify(final)
        except NewerFormatError:
            raise
        except MegatfmError as error:
            aside = final.with_name(f".{final.name}.damaged-{secrets.token_hex(4)}")
            log.warning("%s; moved to %s and replaced", error, aside)
            file_io.rename(final, aside)
        else:
            if file_format.encode_metadata(existing) != raw:
                raise MegatfmError(
                    f"{final} already holds another checkpoint of this step: move it away, or use another run "
                    "directory"
                )
            file_io.remove_tree(staging_dir)
            return
    file_io.rename(staging_dir, final)


def _read_back(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise unless the disk gives back what it was given."""
    for name, entry in files.items():
        file_io.drop_page_cache(folder / name)
        file_format.read_safetensors(folder / name, entry, {}, True)


def _discard(staging_dir: Path | None, error: MegatfmError) -> None:
    """Remove the folder of a save that failed (only rank 0 knows it); the first error stays the one to report."""
    if staging_dir is not None and staging_dir.exists():
        try:
            file_io.remove_tree(staging_dir)
        except MegatfmError as second:
            error.add_note(f"{second}: the next start will remove it")


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


# ------------------------------------------------------------------- by one process, tensor by tensor


def write_checkpoint_from_iterator(
    folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]], state: Mapping[str, JsonValue]
) -> Path:
    """Write the checkpoint `folder/step-00000100` of full tensors, of which no more than one file is in memory, and
    return its path once it is durable.

    A name must not come twice. Raises MegatfmError if anything fails; then nothing is left of it.
    """
    final = folder / f"step-{step:08d}"
    file_io.make_durable_dirs(folder)
    staging_dir = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
    with file_io.naming("create", staging_dir):
        staging_dir.mkdir()
    try:
        entries, files = _write(staging_dir, tensors)
        content = Metadata(
            step=step, state=file_format.check_json_round_trip(state), tensors=entries, files=files
        )
        commit(staging_dir, final, content)
    except BaseException:
        if staging_dir.exists():
            file_io.remove_tree(staging_dir)
        raise
    return final


def _write(
    folder: Path, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, TensorEntry], dict[str, FileEntry]]:
    entries: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    waiting: dict[str, Tensor] = {}

    def flush() -> None:
        if waiting:
            file = f"rank-00000-{len(files):03d}.safetensors"
            files[file] = file_format.write_safetensors(folder / file, waiting)
            entries.update({name: _entry(name, tensor, file) for name, tensor in waiting.items()})
            waiting.clear()

    for name, tensor in tensors:
        if sum(other.nbytes for other in waiting.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        waiting[name] = tensor
    flush()
    return dict(sorted(entries.items())), files


def _entry(name: str, tensor: Tensor, file: str) -> TensorEntry:
    shape = tuple(tensor.shape)
    piece = Piece(offsets=(0,) * len(shape), sizes=shape, file=file, key=name)
    return TensorEntry(dtype=DTYPE_NAMES[tensor.dtype], shape=shape, pieces=(piece,))
