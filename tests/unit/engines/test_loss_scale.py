"""float16: the scale's rule, steps that overflow on one rank and are left out on all, and the scale in a checkpoint."""

from pathlib import Path

import torch

from megatfm import checkpoint
from megatfm.config import ParallelConfig
from megatfm.engines.losses import LossScale
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.sharded_engines import OverflowOnRankOne, overflow_on_one_rank
from tests.support.workers import Workers


def test_the_rule_is_torch_s() -> None:
    """GradScaler's own update, over a series with overflows."""
    loss_scale, expected = LossScale(initial=8.0, growth_interval=3), torch.full((), 8.0)
    growth = torch.zeros((), dtype=torch.int32)
    for overflow in [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]:
        loss_scale.update(not overflow)
        torch._amp_update_scale_(expected, growth, torch.full((), float(overflow)), 2.0, 0.5, 3)
        assert loss_scale.value == expected.item()
    for _ in range(20):
        loss_scale.update(False)
    assert loss_scale.value == 1.0


def near_one_device(parallel: ParallelConfig) -> float:
    """The worst error of a gradient in float16, relative to its norm (or a thousandth of all gradients')."""
    engine, reference = (
        build_engine(UNTIED_MODEL, parallel, ADAMW, precision="fp16"),
        one_device(UNTIED_MODEL),
    )
    batch = global_batch(seed=3)
    _, expected = one_device_gradients(reference, batch)
    assert engine.loss_scale is not None
    engine.loss_scale.value = 2.0**10
    engine.forward_backward(microbatches(engine, batch), CAUSAL)
    floor = 1e-3 * float(torch.cat([g.flatten() for g in expected.values()]).norm())
    errors = []
    for name, gradient in engine.gradients().items():
        assert gradient.dtype == torch.float32
        difference = (gradient - local_block(engine, name, expected[name])).norm()
        errors.append(float(difference) / max(float(expected[name].norm()), floor))
    return max(errors)


def skipped_by_decision(parallel: ParallelConfig) -> None:
    """As torch.amp.GradScaler, the scale looks at the gradients alone."""
    engine, batch = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="fp16"), global_batch(seed=1)
    assert engine.loss_scale is not None
    for count in (1, 2):
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
        assert torch.isnan(torch.tensor(engine.step(1e-2, clip=1.0, skip=True)))
        assert (engine.loss_scale.value, engine.loss_scale._steps) == (2.0**16, count)
    engine.forward_backward(microbatches(engine, batch), OverflowOnRankOne())
    engine.step(1e-2, clip=1.0, skip=True)
    assert (engine.loss_scale.value, engine.loss_scale._steps) == (2.0**15, 0)


def check(layouts: list[ParallelConfig]) -> list[float]:
    for parallel in layouts:
        overflow_on_one_rank(parallel)
        skipped_by_decision(parallel)
    return [near_one_device(parallel) for parallel in layouts]


def test_overflows_are_agreed_and_gradients_unscaled_before_clipping(workers: Workers) -> None:
    layouts = [
        ParallelConfig(dp_shard=2, zero=0),
        ParallelConfig(dp_shard=2, zero=1),
        ParallelConfig(dp_shard=2),
    ]
    for errors in workers.run(check, 2, [*layouts, ParallelConfig(tp=2)]):
        assert max(errors) < 2e-2


def save_and_load(folder: Path) -> None:
    engine = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW, precision="fp16")
    assert engine.loss_scale is not None
    engine.loss_scale.value, engine.loss_scale._steps = 2.0**7, 5
    path = checkpoint.save(folder, 1, engine.state_dict(), {})
    for precision, kept in (("fp16", True), ("bf16", False)):
        other = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW, precision=precision)
        state = other.empty_state_dict(checkpoint.names(path))
        checkpoint.load(path, state)
        other.load_state_dict(state)
        if kept:
            assert other.loss_scale is not None
            assert (other.loss_scale.value, other.loss_scale._steps) == (2.0**7, 5)
        else:
            assert other.loss_scale is None


def test_the_scale_is_in_the_checkpoint(workers: Workers, tmp_path: Path) -> None:
    workers.run(save_and_load, 1, tmp_path)
