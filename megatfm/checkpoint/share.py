"""A rank's share of a save: which pieces it writes, agreed with all others before anything is copied."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata as PlanMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megatfm import ranks
from megatfm.checkpoint.box import ShardedTensor
from megatfm.checkpoint.planner import SavePlanner
from megatfm.ranks import Group


@dataclass(frozen=True)
class WritePlan:
    """The pieces that one rank writes. global_metadata: on rank 0, what all of them together make up."""

    items: tuple[WriteItem, ...]
    global_metadata: PlanMetadata | None

    def tensors_to_write(self, boxes: Mapping[str, ShardedTensor]) -> dict[MetadataIndex, Tensor]:
        """The pieces themselves: views of the boxes' memory."""
        return {item.index: boxes[item.index.fqn].__get_tensor_shard__(item.index) for item in self.items}


def plan_save(what: str, boxes: Mapping[str, ShardedTensor], group: Group = None) -> WritePlan:
    """Share the boxes of all ranks out: each piece to one of its holders, evenly. A collective.

    Raises MegatfmError on all ranks where the boxes don't make up whole tensors.
    """
    planner = SavePlanner()

    def local() -> SavePlan:
        planner.set_up_planner(dict(boxes), is_coordinator=ranks.rank(group) == 0)
        return planner.create_local_plan()

    plans = ranks.run_and_gather(what, local, group)
    tensors: PlanMetadata | None = None
    shares: list[SavePlan] = []

    def share() -> None:
        nonlocal tensors, shares
        shares, tensors = planner.create_global_plan(plans)

    ranks.run_on_rank_0(what, share, group)
    return WritePlan(tuple(ranks.scatter(what, shares, group).items), tensors)
