"""A checkpoint written by one process, tensor by tensor: no more than one file of it is ever in memory."""

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from megatfm.checkpoint import disk, metadata, shard
from megatfm.checkpoint.metadata import DTYPE_NAMES, FileEntry, Metadata, Piece, TensorEntry
from megatfm.checkpoint.writer import FILE_BYTES, commit


def write_checkpoint_from_iterator(
    folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]], state: Mapping[str, JsonValue]
) -> Path:
    """Write the checkpoint `folder/step-00000100` of whole tensors and return its path once it is durable.

    A name must not come twice. Raises MegatfmError if anything fails; then nothing is left of it.
    """
    final = folder / f"step-{step:08d}"
    disk.make_durable_dirs(folder)
    partial = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
    with disk.naming("create", partial):
        partial.mkdir()
    try:
        entries, files = _write(partial, tensors)
        content = Metadata(
            step=step, state=metadata.check_json_round_trip(state), tensors=entries, files=files
        )
        commit(partial, final, content)
    except BaseException:
        if partial.exists():
            disk.remove_tree(partial)
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
            files[file] = shard.write(folder / file, waiting)
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
