"""What this version of torch asks of a pipeline stage is what our stand-in has, no more and no less."""

from dataclasses import fields
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from megatfm.config import ParallelConfig
from megatfm.parallel import pipeline_schedule
from megatfm.parallel.mesh import build_mesh
from megatfm.parallel.pipeline_schedule import FakeStage, reduce_gradients, torch_pipeline_order
from tests.support.workers import Workers

KINDS = (
    schedules.ScheduleInterleaved1F1B,
    schedules.ScheduleInterleavedZeroBubble,
    schedules.ScheduleZBVZeroBubble,
    schedules.ScheduleDualPipeV,
)
PLACE = {field.name for field in fields(FakeStage)}


class Asked(FakeStage):
    """Notes what is read of it."""

    names: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name != "names":
            Asked.names.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_ask_for_a_stage_s_place(kind: Any) -> None:
    Asked.names.clear()
    at = (0, 3) if kind in KINDS[2:] else (0, 2)
    stages: list[FakeStage] = [Asked(stage_index=i, num_stages=4, group_size=2) for i in at]
    order = torch_pipeline_order(kind, stages, 4)
    assert set(order) == {0, 1}
    assert "num_stages" in Asked.names
    assert Asked.names <= PLACE


def reduced() -> tuple[set[str], float]:
    """What the reduction asks for, and the sum of gradients that were left on two ranks."""
    mesh = build_mesh(ParallelConfig(dp_shard=2), 2, "cpu")
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=mesh.device_mesh["dp_shard"])
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 2)).sum().backward()
    Asked.names.clear()
    pipeline_schedule.FakeStage = Asked  # type: ignore[misc]
    try:
        reduce_gradients(model)
    finally:
        pipeline_schedule.FakeStage = FakeStage  # type: ignore[misc]
    (gradient,) = (parameter.grad for parameter in model.parameters())
    return set(Asked.names), float(gradient.to_local().sum())


def test_reducing_asks_for_the_module_alone_and_sums(workers: Workers) -> None:
    assert "scale" not in PipelineStage.perform_reduce_grad.__code__.co_names
    for names, total in workers.run(reduced, 2):
        assert names == {"submod"}
        assert total == 2 * 2.0, "of two rows on this rank's shard, one row of two ones on each rank"
