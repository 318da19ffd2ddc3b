"""Sums of bfloat16's gradients in float32, and float16's loss scale: its rule, skipped steps, and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm import checkpoint
from megatfm.config import ParallelConfig
from megatfm.engines.losses import LossScale
from megatfm.engines.native import fully_sharded
from megatfm.models import build
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.sharded_engines import OverflowOnRankOne, load_checkpoint, overflow_on_one_rank
from tests.support.workers import Workers

LAYOUTS = {
    **{f"zero {zero}": ParallelConfig(dp_shard=2, zero=zero) for zero in range(4)},
    "replicas": ParallelConfig(dp_shard=1, dp_replicate=2, zero=1),
    "hsdp": ParallelConfig(dp_shard=1, dp_replicate=2),
    "stages": ParallelConfig(pp=2, dp_shard=1),
    "tp": ParallelConfig(tp=2, dp_shard=1),
}
SUMS = ("allreduce_", "_reduce_scatter_base_", "reduce_scatter_tensor", "all_reduce")


class Summed(TorchDispatchMode):
    """Elements of each floating dtype that ranks have summed, but for float64's few scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._schema.name.partition("::")[2] in SUMS:
            inputs = args[1] if "scatter_base" in func._schema.name else args[0]
            for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
                if tensor.is_floating_point() and tensor.dtype != torch.float64:
                    self.elements[tensor.dtype] = self.elements.get(tensor.dtype, 0) + tensor.numel()
        return func(*args, **(kwargs or {}))


def summed(layout: str) -> dict[torch.dtype, int]:
    parallel = LAYOUTS[layout]
    engine = build_engine(TIED_MODEL, parallel, ADAMW, precision="bf16")
    with Summed() as sums:
        engine.forward_backward(microbatches(engine, global_batch(seed=1)), CAUSAL)
    assert all(g.dtype == torch.float32 for g in engine.gradients().values())
    return sums.elements


def every_layout() -> None:
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in build(TIED_MODEL).named_parameters()}
    for layout in LAYOUTS:
        actual = summed(layout)
        if layout == "tp":
            # Activations and their gradients are summed as they are; norms' shares of gradients in float32.
            assert actual[torch.float32] >= sum(n for name, n in sizes.items() if "norm" in name)
        elif layout == "stages":
            assert actual == {torch.float32: TIED_MODEL.vocab_size * TIED_MODEL.d_model}, "the tied table's"
        else:
            assert actual.keys() == {torch.float32}, layout
            assert actual[torch.float32] >= sum(sizes.values()), layout


def test_gradients_are_summed_in_float32(workers: Workers) -> None:
    workers.run(every_layout, 2)


def reduced_in_bfloat16() -> set[torch.dtype]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fully_sharded, "MixedPrecisionPolicy", lambda *_: MixedPrecisionPolicy(torch.bfloat16))
        return set(summed("zero 3"))


def test_a_reduction_in_bfloat16_is_seen(workers: Workers) -> None:
    assert all(result == {torch.bfloat16} for result in workers.run(reduced_in_bfloat16, 2))


def test_the_rule_is_torch_s() -> None:
    loss_scale, expected = LossScale(initial=8.0, growth_interval=3), torch.full((), 8.0)
    growth = torch.zeros((), dtype=torch.int32)
    for overflow in [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]:
        loss_scale.update(not overflow)
        torch._amp_update_scale_(expected, growth, torch.full((), float(overflow)), 2.0, 0.5, 3)
        assert loss_scale.value == expected.item()
    for _ in range(20):
        loss_scale.update(False)
    assert loss_scale.value == 1.0


def compute_worst_error(parallel: ParallelConfig) -> float:
    """The worst error of a gradient in float16, relative to its norm (or a thousandth of all gradients')."""
    engine, reference = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="fp16"), one_device(UNTIED_MODEL)
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
    """The scale depends on the gradients alone, as torch.amp.GradScaler's."""
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
    return [compute_worst_error(parallel) for parallel in layouts]


def test_overflows_are_agreed_and_gradients_unscaled_before_clipping(workers: Workers) -> None:
    layouts = [ParallelConfig(dp_shard=2, zero=0), ParallelConfig(dp_shard=2, zero=1), ParallelConfig(dp_shard=2)]
    for errors in workers.run(check, 2, [*layouts, ParallelConfig(tp=2)]):
        assert max(errors) < 2e-2


def save_and_load(folder: Path) -> None:
    engine = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW, precision="fp16")
    assert engine.loss_scale is not None
    engine.loss_scale.value, engine.loss_scale._steps = 2.0**7, 5
    path = checkpoint.save(folder, 1, engine.state_dict(), {})
    for precision, has_scale in (("fp16", True), ("bf16", False)):
        other = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW, precision=precision)
        load_checkpoint(other, path)
        if has_scale:
            assert other.loss_scale is not None
            assert (other.loss_scale.value, other.loss_scale._steps) == (2.0**7, 5)
        else:
            assert other.loss_scale is None


def test_the_scale_is_in_the_checkpoint(workers: Workers, tmp_path: Path) -> None:
    workers.run(save_and_load, 1, tmp_path)
