"""Engines of two ranks that share state: bytes held, gradients, checkpoints, stacks of matrices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn

from megatfm import checkpoint
from megatfm.config import AdamWConfig, OptimizerConfig, OptimizerSection, ParallelConfig
from megatfm.engines.interface import Batch, Engine, OptimizerGroup
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.replicated import Replicated
from megatfm.engines.optimizers import TorchOptimizer
from megatfm.optim.parameters import OPTIMIZERS, ParameterInfo, Role
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches, one_device, one_device_gradients
from tests.support.workers import Workers

PLAIN_ADAMW = AdamWConfig(lr=1e-2)


def count_bytes(tensors: Any) -> int:
    """Bytes of the storages, each once, without scalars such as an optimizer's step count."""
    tensors = [tensor for tensor in tensors if tensor.dim()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_tensors(engine: NativeEngine) -> list[Tensor]:
    """All tensors of the optimizers' state."""
    return [t for o in engine.optimizers for values in o.state().values() for t in values.values()]


def gather_whole(engine: NativeEngine, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by the names of parameters, of which each rank of two axes has its blocks."""
    tensors = {name: block.new_zeros(engine.layout[name].shape) for name, block in blocks.items()}
    local = {name: (engine.regions[name], block) for name, block in blocks.items()}
    for rank in engine.mesh.gather_objects(local, ("dp_shard", "tp")):
        for name, ((offsets, sizes), block) in rank.items():
            assert block.dtype == tensors[name].dtype
            tensors[name][tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = block
    return tensors


class WeighingObjective:
    """A causal objective that notes the bytes of whole weights between a forward and a backward pass."""

    loss_weights, target_counts = CAUSAL.loss_weights, CAUSAL.target_counts
    seen = 0

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        terms = CAUSAL(model, batch)
        full = [p for p in model.parameters() if not isinstance(p, torch.distributed.tensor.DTensor)]
        self.seen = count_bytes(full)
        return terms


def count_held_bytes(parallel: ParallelConfig) -> dict[str, int]:
    """Bytes that this rank holds, by kind; in bfloat16, after one step."""
    engine, objective = (build_engine(UNTIED_MODEL, parallel, PLAIN_ADAMW, precision="bf16"), WeighingObjective())
    batch = global_batch(seed=1)
    engine.forward_backward(microbatches(engine, batch), objective)
    engine.step(1e-2, clip=1.0)
    full = [0]
    if isinstance(engine.data, Replicated):
        send = engine.data._start_next_reduction

        def weigh_gradients() -> None:  # all are there: they go in one bucket
            full[0] = count_bytes([p.grad for p in engine.model.parameters()])
            send()

        engine.data._start_next_reduction = weigh_gradients  # type: ignore[method-assign]
    engine.forward_backward(microbatches(engine, batch), objective)
    return {
        "computed": objective.seen,
        "whole gradients": full[0],
        "stored": count_bytes(engine.local.values()),
        "gradients": count_bytes(engine.gradients().values()),
        "optimizer": count_bytes(optimizer_tensors(engine)),
    }


def low_precision_gradients(zero: Literal[0, 1, 2, 3]) -> dict[str, Tensor]:
    """Whole gradients after two steps in bfloat16, gathered from both ranks."""
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2, zero=zero), PLAIN_ADAMW, precision="bf16")
    for step in range(2):
        engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
        if step == 0:
            engine.step(1e-2, clip=0.0)
    gradients = gather_whole(engine, engine.gradients())
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    return gradients


class OverflowOnRankOne:
    """A causal objective whose loss is beyond float16 on rank 1."""

    loss_weights, target_counts = CAUSAL.loss_weights, CAUSAL.target_counts

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {name: term * 1e30 ** dist.get_rank() for name, term in CAUSAL(model, batch).items()}


def overflow_on_one_rank(parallel: ParallelConfig) -> None:
    """Assert that an overflow on rank 1 alone skips the step on all ranks, and that the next step is right."""
    engine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="fp16")
    assert engine.loss_scale is not None
    before = {name: tensor.clone() for name, tensor in engine.local.items()}
    scale, batch = engine.loss_scale.value, global_batch(seed=1)
    engine.forward_backward(microbatches(engine, batch), OverflowOnRankOne())
    assert not torch.isfinite(torch.tensor(engine.step(1e-2, clip=1.0)))
    assert engine.loss_scale.value == scale / 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.local.items())
    engine.forward_backward(microbatches(engine, batch), CAUSAL)
    norm = engine.step(1e-2, clip=0.5)
    _, expected = one_device_gradients(one_device(UNTIED_MODEL), batch)
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in expected.values()]).norm()), rel=2e-2)
    assert engine.loss_scale.value == scale / 2
    assert not all(torch.equal(tensor, before[name]) for name, tensor in engine.local.items())


def train_steps(engine: NativeEngine, first: int, last: int) -> None:
    """Train on the batches of these steps."""
    for step in range(first, last):
        engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
        engine.step(1e-2, clip=0.3)


def get_tensor(part: checkpoint.ShardedTensor | Tensor) -> Tensor:
    """The tensor of a part of a state."""
    return part.tensor if isinstance(part, checkpoint.ShardedTensor) else part


def load_checkpoint(engine: Engine, path: Path) -> None:
    """Load weights and optimizer state, in any layout."""
    state = engine.empty_state_dict(checkpoint.read_tensor_specs(path))
    checkpoint.load(path, state)
    engine.load_state_dict(state)


def train_and_save(
    folder: Path, parallel: ParallelConfig, optimizer: OptimizerSection
) -> tuple[Path, dict[str, Tensor]]:
    """Three train_steps, a checkpoint, and two steps more; returns the weights held at the end."""
    engine = build_engine(UNTIED_MODEL, parallel, optimizer)
    train_steps(engine, 0, 3)
    path = checkpoint.save(folder, 3, engine.state_dict(), {})
    train_steps(engine, 3, 5)
    return path, {name: tensor.clone() for name, tensor in engine.local.items()}


def load_and_train(
    path: Path, parallel: ParallelConfig, optimizer: OptimizerSection, folder: Path
) -> tuple[Path, dict[str, Tensor]]:
    """Load into an engine that is elsewhere already, save again at once, and take the two steps."""
    engine = build_engine(UNTIED_MODEL, parallel, optimizer)
    train_steps(engine, 7, 8)
    load_checkpoint(engine, path)
    saved = checkpoint.save(folder, 3, engine.state_dict(), {})
    train_steps(engine, 3, 5)
    return saved, {name: tensor.clone() for name, tensor in engine.local.items()}


def assert_same_after_resume(
    workers: Workers, folder: Path, ranks: int, parallel: ParallelConfig, optimizer: OptimizerSection
) -> Path:
    """Assert that two steps after a resume give the bits of an uninterrupted run; returns the checkpoint."""
    straight = workers.run(train_and_save, ranks, folder / "straight", parallel, optimizer)
    path: Path = straight[0][0]
    resumed = workers.run(load_and_train, ranks, path, parallel, optimizer, folder / "resumed")
    for (_, expected), (_, actual) in zip(straight, resumed, strict=True):
        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, actual[name]), name
    return path


RATE = 0.05
OPTIMIZER_SECTION: TypeAdapter[Any] = TypeAdapter(OptimizerConfig)


def check_stack_moves_as_matrices(name: str) -> None:
    """Assert that an optimizer moves a stack as its matrices, also after its state was stored and loaded.

    Muon and SOAP move all in the same products, which may round otherwise than one alone: Muon's are in bfloat16.
    SOAP's matrices are square here: the first covariance of others has eigenvalues of 0, whose eigenvectors may be any.
    """
    m, n = (5, 5) if name == "soap" else (6, 4)
    close: dict[str, Any] | None = {"muon": {"rtol": 0, "atol": 2e-4}, "soap": {"rtol": 1e-9, "atol": 0}}.get(name)
    config = OPTIMIZER_SECTION.validate_python({"name": name, "lr": RATE})
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, m, n, generator=generator, dtype=torch.float64)

    def group_of(names: list[str], shape: tuple[int, ...], role: Role) -> OptimizerGroup:
        infos = {name: ParameterInfo(shape, role, True, True) for name in names}
        return next(group for group in OPTIMIZERS.get(name)(config, infos) if group.names)

    def bare(group: OptimizerGroup) -> int:
        return len(TorchOptimizer(group, {"stack": weights.clone()})._torch_params["stack"])

    alone = {str(i): weights[i].clone() for i in range(3)}
    one_by_one = TorchOptimizer(group_of(list(alone), (m, n), "matrix"), alone)
    stack, group = {"stack": weights.clone()}, group_of(["stack"], (3, m, n), "matrices")
    assert group.granularity == "whole_tensor"
    assert bare(group) == (1 if close else 3), "of these two, all matrices are moved at once"
    together = TorchOptimizer(group, stack)
    for _ in range(6):
        gradient = torch.randn(3, m, n, generator=generator, dtype=torch.float64)
        one_by_one.step(dict(zip(alone, gradient, strict=True)), RATE)
        together.step({"stack": gradient}, RATE)
        one_each = torch.stack(list(alone.values()))
        torch.testing.assert_close(stack["stack"], one_each, **(close or {"rtol": 0, "atol": 0}))
        saved_state, together = together.state(), TorchOptimizer(group, stack)
        together.load(saved_state)
