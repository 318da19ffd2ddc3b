"""The one place where something of ours stands in for a stage of torch.distributed.pipelining.

torch's schedules ask a stage for its place before they plan, and its reduction of gradients for its module; no stage of
torch's is ever made. `tests/unit/parallel/test_torch_stage.py` says with which version of torch they ask for more.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class FakeStage:
    """What torch asks of a stage that is not run; its schedules write on it where the others are."""

    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index: int = 0
    num_stages: int = 1
    group_size: int = 1
    group_rank: int = 0


def torch_pipeline_order(schedule: Any, stages: list[FakeStage], microbatches: int) -> Any:
    """Rank → its actions, by one of torch's schedules for several stages on a rank (stages: those of rank 0)."""
    return schedule(stages, microbatches).pipeline_order


def reduce_gradients(module: nn.Module) -> None:
    """Have FSDP2 reduce the gradients of a module's last backward passes, without scaling them. A collective."""
    from torch.distributed.pipelining import PipelineStage

    PipelineStage.perform_reduce_grad(FakeStage(module), 1)  # type: ignore[arg-type]
