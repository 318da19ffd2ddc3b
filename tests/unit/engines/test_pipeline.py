"""Pipeline stages: types and communicators of what they send, and a backward pass in two parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import ParallelConfig
from megatfm.engines.passes import backward_input
from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.errors import MegatfmError
from megatfm.parallel.mesh import PIPELINE
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import UNTIED_MODEL
from tests.support.parity import build_engine, uneven_microbatches
from tests.support.workers import Workers


def test_a_carry_of_another_type_than_the_next_stage_takes_is_refused() -> None:
    """A plugin's float32 under bf16: gloo would fail by the size, and NCCL read beyond the end."""
    passes = PipelineForwardBackward.__new__(PipelineForwardBackward)
    passes._dtype = torch.bfloat16
    passes._pipeline = SimpleNamespace(stages={1: SimpleNamespace(rank=1)})  # type: ignore[assignment]
    stream = {"x": SimpleNamespace(d_model=8)}
    with pytest.raises(
        MegatfmError, match=r"x is torch\.float32, but the next pipeline stage expects torch\.bfloat16"
    ):
        passes._send(stream, {"x": torch.ones(2, 8)}, 1, None)  # type: ignore[arg-type]
    with pytest.raises(
        MegatfmError, match=r"is torch\.int32, but the next pipeline stage expects torch\.int64"
    ):
        passes._send({"x": SimpleNamespace(d_model=None)}, {"x": torch.ones(2, dtype=torch.int32)}, 1, None)  # type: ignore[dict-item, arg-type]


def groups_by_direction(parallel: ParallelConfig) -> None:
    engine = build_engine(UNTIED_MODEL, parallel)
    stage = dist.get_rank()
    actual: dict[str, set[str]] = {"forward": set(), "back": set()}
    calls = {name: getattr(dist, name) for name in ("isend", "irecv")}
    with pytest.MonkeyPatch.context() as patch:
        for name, ahead in (("isend", 1), ("irecv", -1)):

            def seen(
                tensor: Any,
                group: Any,
                *,
                group_dst: int = 0,
                group_src: int = 0,
                ahead: int = ahead,
                name: str = name,
            ) -> Any:
                other = group_dst if name == "isend" else group_src
                actual["forward" if other - stage == ahead else "back"].add(str(group.group_name))
                peer = {"group_dst": other} if name == "isend" else {"group_src": other}
                return calls[name](tensor, group=group, **peer)

            patch.setattr(dist, name, seen)
        engine.forward_backward(uneven_microbatches(engine, global_batch(seed=2)), CAUSAL)
    (forward,), (back,) = actual.values()
    assert forward != back
    named = engine.process_groups()
    assert named[forward] == named[back] == PIPELINE


def test_no_direction_queues_behind_the_other(workers: Workers) -> None:
    workers.run(groups_by_direction, 2, ParallelConfig(pp=2, dp_shard=1))


WIDTH = 6


class Parts(nn.Module):
    """What a stage may hold: layers on the way, one that is used twice, a bias that several steps share, and a loss
    that doesn't depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Embedding(3, WIDTH)
        self.aside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = self.bias(torch.arange(3)).tanh().sum(0)
        y = torch.tanh(self.first(x) + shared)
        y = self.twice(torch.tanh(self.twice(y)))
        y = y + self.second(memory * y) + shared
        return y, (memory * 2).sin(), self.aside(torch.ones(2, WIDTH, dtype=x.dtype)).sum()


@pytest.fixture
def parts() -> Parts:
    torch.manual_seed(0)
    return Parts().double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, memory = torch.randn(2, 2, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), memory.requires_grad_()


def gradients(parts: Parts) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in parts.named_parameters() if p.grad is not None}


def test_the_parts_of_a_backward_pass_make_up_the_whole(parts: Parts) -> None:
    x, memory = inputs()
    y, z, loss = parts(x, memory)
    into_y, into_z = torch.full_like(y, 0.5), torch.full_like(z, -0.25)
    torch.autograd.backward([y, z, loss], [into_y, into_z, None])
    assert x.grad is not None
    assert memory.grad is not None
    expected = gradients(parts), x.grad.clone(), memory.grad.clone()
    parts.zero_grad()

    x, memory = inputs()
    y, z, loss = parts(x, memory)
    later = backward_input([y, z, loss], [into_y, into_z, None], [x, memory])
    torch.testing.assert_close((x.grad, memory.grad), expected[1:], rtol=1e-13, atol=0)
    at_once = gradients(parts).keys()
    assert {"twice.weight", "bias.weight", "aside.0.weight"} <= at_once
    assert not {"first.weight", "second.weight", "second.bias"} & at_once, "these can wait"
    later()
    torch.testing.assert_close(gradients(parts), expected[0], rtol=1e-12, atol=1e-15)


def test_micro_batches_add_up(parts: Parts) -> None:
    x, memory = inputs()
    parts(x, memory)[0].sum().backward()
    once = gradients(parts)
    parts.zero_grad()
    laters = []
    for _ in range(3):
        x, memory = inputs()
        laters.append(backward_input([parts(x, memory)[0].sum()], [None], [x, memory]))
    for later in laters:
        later()
    torch.testing.assert_close(
        gradients(parts), {name: 3 * g for name, g in once.items()}, rtol=1e-12, atol=1e-15
    )


def test_a_stage_without_inputs_does_all_of_it_later(parts: Parts) -> None:
    loss = parts.aside(torch.ones(2, WIDTH, dtype=torch.float64)).sum()
    later = backward_input([loss], [None], [])
    assert gradients(parts) == {}
    later()
    assert gradients(parts).keys() == {f"aside.{i}.{key}" for i in (0, 2) for key in ("weight", "bias")}
