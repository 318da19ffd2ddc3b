"""Save and load checkpoints: the collective half of the store."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from megatfm import ranks
from megatfm.checkpoint import disk, metadata
from megatfm.checkpoint.box import ShardedTensor
from megatfm.checkpoint.folder import purge_old_checkpoints
from megatfm.checkpoint.metadata import DTYPE_NAMES, Metadata
from megatfm.checkpoint.reader import Reader
from megatfm.checkpoint.share import plan_save
from megatfm.checkpoint.writer import write_checkpoint
from megatfm.errors import MegatfmError, UsageError


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, ShardedTensor | Tensor],
    state: Mapping[str, JsonValue],
    *,
    keep: int | None = None,
) -> Path:
    """Write the checkpoint `folder/step-00000100`, on all ranks together, and return its path once it is durable.

    `tensors` may hold other names and boxes on every rank; together they must make up whole tensors. A plain
    tensor is a replica: all ranks that pass it must pass the same values. `folder`, `step`, `state` and `keep`
    are rank 0's. With `keep`, of the older checkpoints only the newest whole ones stay, `keep` with this one.
    The same content of the same step again returns the one that is there; another content is refused.

    Raises MegatfmError on every rank if anything fails on any; then no trace of this save is left, and every
    older checkpoint is as it was.
    """
    check_keep(keep)
    what = f"checkpoint of step {step} not saved"
    boxes, plain = ranks.run_on_all_ranks(
        what, lambda: (boxes_of(tensors), metadata.check_json_round_trip(state))
    )
    share = plan_save(what, boxes)
    final = write_checkpoint(folder, step, plain, share, lambda: share.tensors_to_write(boxes))
    if keep is not None and ranks.rank() == 0:
        purge_old_checkpoints(final, keep)
    return final


def load(
    path: Path, tensors: Mapping[str, ShardedTensor | Tensor], *, cast: bool = False
) -> dict[str, JsonValue]:
    """Fill the given tensors in place from a checkpoint, on all ranks together, and return its `state`.

    Each rank passes the names and boxes that it wants, cut however it needs them. Every file that a rank reads
    is checked against its hash. Values are converted to another dtype only with `cast`.

    Raises MegatfmError on every rank if a name is missing, a shape or dtype differs or a file is damaged; the
    tensors may be filled in part by then.
    """
    what = f"checkpoint {path} not loaded"

    # Rank 0 sees what is there and tells the others, whose machines may see it later.
    raw = ranks.run_on_rank_0(what, lambda: disk.read_file(path / metadata.FILENAME))

    def plan() -> Reader:
        content, boxes = metadata.parse(path, raw), boxes_of(tensors)
        for name, box in boxes.items():
            _check_request(content, name, box, cast)
        return Reader(path, content, boxes)

    reader = ranks.run_on_all_ranks(what, plan)
    # What several ranks of a machine read comes from the disk once, and for the others out of the page cache.
    alone = ranks.unique_on_host(reader.files)
    patience = disk.NFS_VISIBILITY_SECONDS if ranks.world_size() > 1 else 0.0
    ranks.run_on_all_ranks(what, lambda: reader.fill(patience, alone))
    return reader.content.state


def read_tensors(path: Path, prefix: str = "", only: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, or `only` some, whole, on the CPU of this process alone."""
    content = metadata.read(path)
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.torch_dtype)
        for name, entry in content.tensors.items()
        if name.startswith(prefix) and (only is None or name in only)
    }
    reader = Reader(path, content, boxes_of(tensors))
    reader.fill(alone=reader.files)
    return tensors


def read_state(path: Path) -> dict[str, JsonValue]:
    """Return the `state` that a checkpoint was saved with."""
    return metadata.read(path).state


def names(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return every tensor's dtype and global shape by name."""
    return metadata.read(path).names()


def boxes_of(tensors: Mapping[str, ShardedTensor | Tensor]) -> dict[str, ShardedTensor]:
    """Every tensor as a box."""
    return {name: ShardedTensor.from_tensor(tensor) for name, tensor in tensors.items()}


def check_keep(keep: int | None) -> None:
    """Raise UsageError where no checkpoint would be kept."""
    if keep is not None and keep < 1:
        raise UsageError(f"keep = {keep}: at least one checkpoint must be kept, so 1 or more")


def _check_request(content: Metadata, name: str, box: ShardedTensor, cast: bool) -> None:
    entry = content.tensors.get(name)
    if entry is None:
        raise MegatfmError(f"it has no tensor {name}")
    if entry.shape != tuple(box.global_shape):
        raise MegatfmError(f"tensor {name} has shape {entry.shape} there, but {tuple(box.global_shape)} here")
    if entry.torch_dtype != box.tensor.dtype and not cast:
        model = DTYPE_NAMES.get(box.tensor.dtype, str(box.tensor.dtype))
        raise MegatfmError(
            f"tensor {name} is {entry.dtype} there, but {model} here: pass cast=True to convert"
        )
