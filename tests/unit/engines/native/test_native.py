"""The engine's step, its norm, its state after a resume, and steps that the device skips by itself."""

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm import checkpoint
from megatfm.config import AdamWConfig, OptimizerSection, ParallelConfig
from megatfm.engines.base import count_threads
from megatfm.engines.interface import PRECISIONS
from megatfm.engines.native.engine import NativeEngine, shard_parameters
from megatfm.engines.native.zero import ZeroOptions
from megatfm.engines.optimizers import ElementwiseOptimizer
from megatfm.errors import MegatfmError, UsageError
from megatfm.ops.transfer import DeferredReads
from megatfm.parallel.layout import ModelLayout, TensorLayout
from megatfm.parallel.mesh import Mesh
from tests.support.batches import CAUSAL, PassThroughObjective, family_case, global_batch
from tests.support.layouts import EXTENDED
from tests.support.models import ADAMW, MUON, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    local_block,
    microbatches,
    one_device,
    one_device_gradients,
    uneven_microbatches,
)
from tests.support.sharded_engines import assert_same_after_resume, get_tensor, load_checkpoint, train_steps
from tests.support.workers import Workers


def test_threads_that_draw_weights_are_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for local_ranks, threads in (("3", 4), ("24", 1), ("", 1)):  # an empty variable is that of no launcher
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        assert count_threads() == threads


def test_a_scalar_parameter_is_refused_with_the_shape_that_works() -> None:
    """Such as a learned temperature of a plugin; FSDP2's own error speaks of its functions."""
    model = nn.Module()
    model.temperature = nn.Parameter(torch.ones((), device="meta"))
    layout = ModelLayout({"temperature": TensorLayout("temperature", ())}, "")
    mesh: Any = SimpleNamespace(size=lambda axis: 1)
    message = r"^temperature is a scalar parameter.* nn\.Parameter\(torch\.ones\(1\)\)$"
    for zero in (ZeroOptions(zero=0), ZeroOptions(zero=3)):
        with pytest.raises(UsageError, match=message):
            shard_parameters(model, layout, mesh, zero, PRECISIONS["fp32"], torch.device("cpu"))


LAYOUTS = {1: ParallelConfig(), 2: ParallelConfig(tp=2), 4: ParallelConfig(dp_replicate=2, tp=2)}


def norms(parallel: ParallelConfig) -> tuple[float, float, float]:
    """The gradient norm that a step reports, that of one device, and the largest change by clipping to a tenth."""
    engine, model = build_engine(TIED_MODEL, parallel, ADAMW), one_device(TIED_MODEL)
    batch = global_batch(seed=3)
    _, expected = one_device_gradients(model, batch)
    expected_norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    engine.forward_backward(microbatches(engine, batch), CAUSAL)
    clipped: dict[str, Tensor] = {}
    for optimizer in engine.optimizers:
        optimizer.step = lambda gradients, lr: clipped.update({n: g.clone() for n, g in gradients.items()})  # type: ignore[method-assign]
    norm = engine.step(0.1, clip=float(expected_norm) / 10)
    differences = [
        float((gradient - local_block(engine, name, expected[name]) / 10).abs().max())
        for name, gradient in clipped.items()
        if gradient.numel()
    ]
    return norm, float(expected_norm), max(differences)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_norm_counts_each_element_once_and_clips_by_it(workers: Workers, ranks: int) -> None:
    for norm, expected, difference in workers.run(norms, ranks, LAYOUTS[ranks]):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert difference <= 1e-6 * expected  # the customary 1e-6 in the divisor


def copy_state(engine: NativeEngine) -> dict[str, Tensor]:
    """The contents of a checkpoint: weights, optimizer state and the rest of the engine's state."""
    return {name: get_tensor(part).clone() for name, part in engine.state_dict().items()}


def one_bad_gradient(value: float) -> None:
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), MUON)
    train_steps(engine, 0, 1)
    before = copy_state(engine)
    engine.forward_backward(microbatches(engine, global_batch(seed=1)), CAUSAL)
    if dist.get_rank() == 1:
        engine.gradients()["decoder.layers.0.ffn.w_up.weight"][-1, -1] = value
    norm = engine.step(1e-2, clip=1.0)
    assert not torch.isfinite(torch.tensor(norm))
    after = copy_state(engine)
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert engine.gradients() == {}, "the bad gradient would be added to the next one"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(workers: Workers, value: float) -> None:
    workers.run(one_bad_gradient, 2, value)


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
def test_training_after_a_load_equals_plain_training(
    workers: Workers, tmp_path: Path, optimizer: OptimizerSection
) -> None:
    assert_same_after_resume(workers, tmp_path, 2, ParallelConfig(dp_shard=2, zero=1), optimizer)


def weights_from_outside() -> None:
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), MUON)
    for tensor in engine.local.values():
        tensor.fill_(0.5)
    engine.sync_weights()
    engine.forward_backward(microbatches(engine, global_batch(seed=0)), CAUSAL)
    engine.step(0.0, clip=0.0)
    assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in engine.local.values())


def test_an_optimizer_s_copies_follow_weights_that_are_set_from_outside(workers: Workers) -> None:
    workers.run(weights_from_outside, 2)


def train_without_sentences(layouts: list[ParallelConfig]) -> None:
    """A BERT whose pairs nobody asks about."""
    config, batch = family_case("bert", False)
    del batch["sentence_targets"]
    for parallel in layouts:
        engine = build_engine(config, parallel)
        with pytest.raises(MegatfmError, match=r"no loss depends on sentence\.\S+, .* \(4 of the weights here\)"):
            engine.forward_backward(uneven_microbatches(engine, batch), PassThroughObjective(["masked", "boundary"]))


def test_weights_that_no_loss_depends_on_are_named(workers: Workers) -> None:
    """Weights are named under every ZeRO stage, instead of being left to decay."""
    workers.run(train_without_sentences, 1, [ParallelConfig(zero=zero) for zero in (0, 3)])
    workers.run(train_without_sentences, 2, [ParallelConfig(dp_shard=2, zero=zero) for zero in (0, 1, 2, 3)])


def engines_end(layouts: list[ParallelConfig]) -> None:
    for parallel in layouts:
        engine = build_engine(TIED_MODEL, parallel, ADAMW)
        engine.forward_backward(microbatches(engine, global_batch(seed=3)), CAUSAL)
        data = weakref.ref(engine.data)
        del engine
        gc.collect()
        assert data() is None, f"{parallel}: something out of the collector's sight keeps it, and with it all weights"


def test_an_unreferenced_engine_is_freed(workers: Workers) -> None:
    workers.run(engines_end, 2, [ParallelConfig(dp_shard=2, zero=zero) for zero in (0, 1, 2, 3)])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_one_data_rank_communicates_with_no_other(workers: Workers, zero: int) -> None:
    """Nothing is gathered, scattered or copied under any stage, beside tensor parallelism, too."""
    assert workers.run(shares_weights_with_optimizer, 1, ParallelConfig(zero=zero)) == [True]
    assert workers.run(shares_weights_with_optimizer, 2, ParallelConfig(zero=zero, tp=2)) == [True] * 2
    assert workers.run(shares_weights_with_optimizer, 2, ParallelConfig(zero=zero, dp_shard=2)) == [False] * 2


def shares_weights_with_optimizer(parallel: ParallelConfig) -> bool:
    """Whether the optimizer moves the very tensors that the model computes with, and these are plain ones."""
    engine = build_engine(UNTIED_MODEL, parallel, ADAMW)
    computed = dict(engine.model.named_parameters())
    return all(
        type(computed[name].data) is Tensor
        and computed[name].data_ptr() == box.tensor.data_ptr()
        and computed[name].shape == box.tensor.shape
        for name, box in engine.weights().items()
    )


def misused(parallel: ParallelConfig) -> None:
    """A second pass before the step, and an evaluation of nothing; how often ranks add up in one of several batches."""
    engine, batch = build_engine(TIED_MODEL, parallel, ADAMW), global_batch(seed=3)
    engine.forward_backward(microbatches(engine, batch), CAUSAL)
    with pytest.raises(MegatfmError, match="called twice without a step"):
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
    engine.zero_grad()
    first = engine.forward_backward(microbatches(engine, batch), CAUSAL).loss
    engine.step(1e-2, clip=1.0)
    assert engine.forward_backward(microbatches(engine, batch), CAUSAL).loss < first
    engine.zero_grad()
    with pytest.raises(MegatfmError, match="no batch to compute a loss of"):
        engine.evaluate([], CAUSAL)
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        genuine = Mesh.all_reduce_
        patch.setattr(Mesh, "all_reduce_", lambda *args: (counted.append(1), genuine(*args))[1])
        several = microbatches(engine, batch)
        full = engine.evaluate(several * 3, CAUSAL)
        three = len(counted)
        engine.evaluate(several, CAUSAL)
    assert len(counted) - three == three, "as often for one batch as for three"
    assert full.target_counts == {name: 3 * n for name, n in engine.evaluate(several, CAUSAL).target_counts.items()}


def test_a_pass_is_followed_by_its_step_and_an_evaluation_has_batches(workers: Workers) -> None:
    workers.run(misused, 1, ParallelConfig(zero=0))
    workers.run(misused, 2, ParallelConfig(dp_shard=2, zero=0))


# ---------------------------------------------------------------------------------------------- skipped steps


SHORT = AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.3, moments_dtype="bf16")
SPOILED = {"gradient", "loss", "asked"}
STEPS = ("gradient", "", "clipped", "loss", "", "asked", "clipped", "")


def early(engine: NativeEngine) -> NativeEngine:
    """Let optimizers decide about skips on the device, as on a GPU."""
    engine.skipping_optimizers = [optimizer for optimizer in engine.optimizers if optimizer.can_skip]
    return engine


def take_steps(engine: NativeEngine, steps: tuple[str, ...], first: int = 0) -> list[float]:
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


def compare(parallel: ParallelConfig, optimizer: OptimizerSection, precision: str, folder: Path) -> int:
    """The number of optimizers that decide on the device."""
    host = build_engine(TIED_MODEL, parallel, optimizer, precision=precision)
    device = early(build_engine(TIED_MODEL, parallel, optimizer, precision=precision))
    norms = take_steps(host, STEPS)
    assert torch.equal(torch.tensor(take_steps(device, STEPS)).nan_to_num(), torch.tensor(norms).nan_to_num())
    assert [torch.tensor(n).isfinite().item() for n in norms] == [kind not in SPOILED for kind in STEPS]
    if host.loss_scale:
        assert host.loss_scale.value == device.loss_scale.value  # type: ignore[union-attr]
    path = checkpoint.save(folder / f"{optimizer.name}-{precision}", 1, device.state_dict(), {})
    resumed = early(build_engine(TIED_MODEL, parallel, optimizer, precision=precision))
    load_checkpoint(resumed, path)
    for engine in (host, device, resumed):
        take_steps(engine, ("gradient", "", "clipped"), len(STEPS))
    expected = copy_state(host)
    for engine in (device, resumed):
        actual = copy_state(engine)
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    return len(device.skipping_optimizers)


def compare_all(cases: list[tuple[ParallelConfig, OptimizerSection, str]], folder: Path) -> list[int]:
    return [compare(*case, folder / f"{cases[0][0].dp_shard}-{number}") for number, case in enumerate(cases)]


ALONE, SHARDED, CUT = ParallelConfig(), ParallelConfig(dp_shard=2), ParallelConfig(dp_shard=2, zero=1)


@pytest.mark.parametrize(("ranks", "cases"), [
    (1, [(ALONE, SHORT, "bf16"), (ALONE, ADAMW, "fp16")]),
    (2, [(SHARDED, ADAMW, "fp32"), (CUT, MUON, "bf16")]),
    pytest.param(1, [(ALONE, ADAMW, "fp32"), (ALONE, MUON, "fp32")], marks=EXTENDED),
    pytest.param(2, [(CUT, SHORT, "bf16")], marks=EXTENDED),
], ids=["one rank", "two ranks", "one rank, further", "two ranks, further"])  # fmt: skip
def test_steps_skipped_on_the_device_leave_the_same_bits(
    workers: Workers, tmp_path: Path, ranks: int, cases: list[tuple[ParallelConfig, OptimizerSection, str]]
) -> None:
    for early_ones in workers.run(compare_all, ranks, cases, tmp_path):
        assert set(early_ones) == {1}


def order_of_a_step() -> list[str]:
    """Events of a step whose gradients are clipped, in order."""
    engine = early(build_engine(TIED_MODEL, ParallelConfig(), MUON))
    output: list[str] = []
    take_steps(engine, ("",))
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


def test_optimizers_that_decide_on_the_device_run_before_the_host_reads(workers: Workers) -> None:
    (result,) = workers.run(order_of_a_step, 1)
    assert result == ["sent", "AdamW", "read", "Muon"]
