"""Plans of which rank writes and reads which pieces: torch.distributed.checkpoint's planners, with sharded tensors in
place of DTensors.

A save is planned before anything is copied: each piece of a tensor is written by one rank of those that hold it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from megatfm import object_collectives
from megatfm.checkpoint.file_format import DTYPE_NAMES
from megatfm.checkpoint.sharded_tensor import ShardedTensor, check_cover
from megatfm.errors import MegatfmError
from megatfm.object_collectives import Group


@dataclass(frozen=True)
class WritePlan:
    """The pieces that one rank writes. global_metadata: on rank 0, what all of them together make up."""

    items: tuple[WriteItem, ...]
    global_metadata: PlanMetadata | None

    def tensors_to_write(self, shards: Mapping[str, ShardedTensor]) -> dict[MetadataIndex, Tensor]:
        """Return the pieces as views of the shards' memory."""
        return {item.index: shards[item.index.fqn].__get_tensor_shard__(item.index) for item in self.items}


def plan_save(action: str, shards: Mapping[str, ShardedTensor], group: Group = None) -> WritePlan:
    """Plan a save of all ranks' shards: each piece is written by one of its holders, evenly. A collective.

    Raises MegatfmError on all ranks where the shards don't make up whole tensors.
    """
    planner = SavePlanner()

    def local() -> SavePlan:
        planner.set_up_planner(dict(shards), is_coordinator=object_collectives.rank(group) == 0)
        return planner.create_local_plan()

    plans = object_collectives.run_and_gather(action, local, group)
    tensors: PlanMetadata | None = None
    shares: list[SavePlan] = []

    def plan_all_ranks() -> None:
        nonlocal tensors, shares
        shares, tensors = planner.create_global_plan(plans)

    object_collectives.run_on_rank_0(action, plan_all_ranks, group)
    return WritePlan(tuple(object_collectives.scatter(action, shares, group).items), tensors)


class SavePlanner(DefaultSavePlanner):
    """Plans a save: replicas once, the writing shared out evenly, every tensor whole."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """List this rank's pieces. Checked here, because an error here reaches every rank."""
        for name, shard in self.state_dict.items():
            if not name or name == "__metadata__":  # the one key that safetensors keeps for itself
                raise MegatfmError(f"a tensor can't be stored under the name {name!r}")
            if shard.tensor.dtype not in DTYPE_NAMES or shard.tensor.is_meta:
                raise MegatfmError(
                    f"tensor {name}: {shard.tensor.dtype} on {shard.tensor.device} can't be stored"
                )
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give each piece to one rank; raises MegatfmError if a tensor's shards don't make it up."""
        return super().create_global_plan(balance_save_plans(all_plans))


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load of shards out of whatever shards were saved."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what is given; torch's own would replace every value that it doesn't know by None."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return a piece of the destination, a view of its memory."""
        shard: ShardedTensor = self.state_dict[index.fqn]
        return shard.__get_tensor_shard__(index)


def balance_save_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Keep each piece in one plan only, such that the ranks write about the same number of bytes.

    Largest first, each to the least loaded of its holders. torch's own deduplication weighs every shard with the
    bytes of its whole tensor, and takes shards that merely start at the same place for replicas.
    """
    items: dict[MetadataIndex, WriteItem] = {}
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            first = items.setdefault(item.index, item)
            if _data(first) != _data(item):
                raise MegatfmError(
                    f"tensor {item.index.fqn}: ranks {holders[item.index][0]} and {rank} hold different shards "
                    f"at {tuple(item.index.offset or ())}"
                )
            holders[item.index].append(rank)
    _check_tensors(items)
    loads = [0] * len(plans)
    shares: list[list[WriteItem]] = [[] for _ in plans]
    # What only one rank holds is settled first; the replicas then even it out.
    for index in sorted(
        items, key=lambda index: (len(holders[index]) > 1, -item_bytes(items[index]), _sort_key(index))
    ):
        rank = min(holders[index], key=lambda rank: loads[rank])
        loads[rank] += item_bytes(items[index])
        shares[rank].append(items[index])
    return [
        replace(plan, items=sorted(share, key=lambda item: _sort_key(item.index)))
        for plan, share in zip(plans, shares, strict=True)
    ]


def _check_tensors(items: Mapping[MetadataIndex, WriteItem]) -> None:
    by_name: dict[str, list[TensorWriteData]] = defaultdict(list)
    for index, item in items.items():
        by_name[index.fqn].append(_data(item))
    for name, pieces in by_name.items():
        first = pieces[0]
        for other in pieces:
            if (other.size, other.properties.dtype) != (first.size, first.properties.dtype):
                raise MegatfmError(
                    f"tensor {name}: ranks disagree on what it is, {first.properties.dtype} {tuple(first.size)} "
                    f"or {other.properties.dtype} {tuple(other.size)}"
                )
        check_cover(name, first.size, [(piece.chunk.offsets, piece.chunk.sizes) for piece in pieces])


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # shards make no other items
    return item.tensor_data


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of the piece that an item writes."""
    data = _data(item)
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _sort_key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())
