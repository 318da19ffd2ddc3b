"""Steps that the device leaves out by itself: the same bits as where the host decides, and it is asked once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import AdamWConfig, OptimizerSection, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.optimizers import ElementwiseOptimizer
from megatfm.ops.transfer import DeferredReads
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, MUON, TIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

SHORT = AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.3, moments_dtype="bf16")
SPOILED = {"gradient", "loss", "asked"}
STEPS = ("gradient", "", "clipped", "loss", "", "asked", "clipped", "")


def early(engine: NativeEngine) -> NativeEngine:
    """As an engine on a GPU decides."""
    engine.skipping_optimizers = [optimizer for optimizer in engine.optimizers if optimizer.can_skip]
    return engine


def take(engine: NativeEngine, steps: tuple[str, ...], first: int = 0) -> list[float]:
    """Steps of which some are spoiled; their norms."""
    norms = []
    for number, kind in enumerate(steps, first):
        engine.forward_backward(microbatches(engine, global_batch(seed=number)), CAUSAL)
        if kind == "gradient":
            next(iter(engine.gradients().values())).view(-1)[:1] = torch.inf
        if kind == "loss":
            engine.pending_losses[1][0] = torch.nan
        norms.append(engine.step(1e-2, 1e-3 if kind == "clipped" else 1e3, skip=kind == "asked"))
    return norms


def bits(engine: NativeEngine) -> dict[str, Tensor]:
    """All that a checkpoint would hold."""
    return {
        name: (value if isinstance(value, Tensor) else value.tensor).clone()
        for name, value in engine.state_dict().items()
    }


def compare(parallel: ParallelConfig, optimizer: OptimizerSection, precision: str, folder: Path) -> int:
    """The number of optimizers that decide on the device."""
    host = build_engine(TIED_MODEL, parallel, optimizer, precision=precision)
    device = early(build_engine(TIED_MODEL, parallel, optimizer, precision=precision))
    norms = take(host, STEPS)
    assert torch.equal(torch.tensor(take(device, STEPS)).nan_to_num(), torch.tensor(norms).nan_to_num())
    assert [torch.tensor(n).isfinite().item() for n in norms] == [kind not in SPOILED for kind in STEPS]
    if host.loss_scale:
        assert host.loss_scale.value == device.loss_scale.value  # type: ignore[union-attr]
    path = checkpoint.save(folder / f"{optimizer.name}-{precision}", 1, device.state_dict(), {})
    resumed = early(build_engine(TIED_MODEL, parallel, optimizer, precision=precision))
    state = resumed.empty_state_dict(checkpoint.read_names(path))
    checkpoint.load(path, state)
    resumed.load_state_dict(state)
    for engine in (host, device, resumed):
        take(engine, ("gradient", "", "clipped"), len(STEPS))
    expected = bits(host)
    for engine in (device, resumed):
        actual = bits(engine)
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    return len(device.skipping_optimizers)


def compare_all(cases: list[tuple[ParallelConfig, OptimizerSection, str]], folder: Path) -> list[int]:
    return [compare(*case, folder / f"{cases[0][0].dp_shard}-{number}") for number, case in enumerate(cases)]


def test_steps_skipped_on_the_device_leave_the_same_bits(workers: Workers, tmp_path: Path) -> None:
    alone, sharded, cut = ParallelConfig(), ParallelConfig(dp_shard=2), ParallelConfig(dp_shard=2, zero=1)
    one = [(alone, ADAMW, "fp32"), (alone, SHORT, "bf16"), (alone, ADAMW, "fp16"), (alone, MUON, "fp32")]
    two = [(sharded, ADAMW, "fp32"), (cut, SHORT, "bf16"), (cut, MUON, "bf16")]
    for early_ones in (
        *workers.run(compare_all, 1, one, tmp_path),
        *workers.run(compare_all, 2, two, tmp_path),
    ):
        assert set(early_ones) == {1}


def order_of_a_step() -> list[str]:
    """Who did what, of a step whose gradients are clipped."""
    engine = early(build_engine(TIED_MODEL, ParallelConfig(), MUON))
    output: list[str] = []
    take(engine, ("",))
    engine.forward_backward(microbatches(engine, global_batch(seed=1)), CAUSAL)
    send, read = DeferredReads.start_copy, DeferredReads.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredReads, "start_copy", lambda self: (output.append("sent"), send(self)))
        patch.setattr(DeferredReads, "read", lambda self: (output.append("read"), read(self)))
        for optimizer in engine.optimizers:
            kind = "AdamW" if isinstance(optimizer, ElementwiseOptimizer) else "Muon"
            step = optimizer.step
            patch.setattr(optimizer, "step", lambda *args, s=step, k=kind: (output.append(k), s(*args)))
        engine.step(1e-2, clip=1e-3)
    return output


def test_what_decides_on_the_device_runs_before_the_host_reads(workers: Workers) -> None:
    (result,) = workers.run(order_of_a_step, 1)
    assert result == ["sent", "AdamW", "read", "Muon"]
