"""Two towers and vision-language models in bfloat16, in layouts: loss and gradients as in float64, but for rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from tests.support.image_text_models import (
    LLAVA_MODELS,
    TOWER_MODELS,
    TowerObjective,
    llava_reference,
    tower_microbatches,
    tower_reference,
)
from tests.support.models import ADAMW
from tests.support.parity import build_engine, local_block, uneven_microbatches
from tests.support.workers import Workers

LAYOUTS = {
    "zero 1": ParallelConfig(dp_shard=2, zero=1),
    "zero 3": ParallelConfig(dp_shard=2),
    "tp": ParallelConfig(tp=2),
    "cp": ParallelConfig(cp=2),
}


def distances(engine: NativeEngine, model: nn.Module) -> tuple[float, float]:
    """Squared norms of the error of this rank's gradients and of the gradients."""
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    blocks = {name: local_block(engine, name, expected[name]) for name in engine.gradients()}
    errors = [(g.double() - blocks[name]).square().sum() for name, g in engine.gradients().items()]
    return float(torch.stack(errors).sum()), float(torch.stack([b.square().sum() for b in blocks.values()]).sum())


def run_towers(name: str) -> dict[str, tuple[float, float, float]]:
    """Return the loss's relative error, squared errors and squares of gradients, by layout."""
    model, batch, loss = tower_reference(name)
    results = {}
    for layout, parallel in LAYOUTS.items():
        engine = build_engine(TOWER_MODELS[name], parallel, ADAMW, precision="bf16")
        mesh = engine.mesh
        batches = tower_microbatches(batch, mesh.data_rank, mesh.data_ranks, 2)
        totals = engine.forward_backward(batches, TowerObjective())
        results[layout] = (abs(totals.loss / loss - 1), *distances(engine, model))
    return results


def run_llava(name: str) -> dict[str, tuple[float, float, float]]:
    """Return what `run_towers` returns, for a vision-language model."""
    batch, model, objective, loss = llava_reference(name)
    results = {}
    for layout, parallel in LAYOUTS.items():
        engine = build_engine(LLAVA_MODELS[name], parallel, ADAMW, precision="bf16")
        totals = engine.forward_backward(uneven_microbatches(engine, batch), objective)
        results[layout] = (abs(totals.loss / loss - 1), *distances(engine, model))
    return results


CASES = [(run_towers, "softmax"), pytest.param(run_towers, "sigmoid", marks=pytest.mark.extended), (run_llava, "mlp")]


@pytest.mark.parametrize(("run", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_layouts_in_bfloat16_differ_by_rounding_alone(workers: Workers, run: Callable[..., object], name: str) -> None:
    """bfloat16 has 8 bits: one rounding is up to 0.4 %. Measured: losses 0.07 %, gradients 1.0 % at most."""
    by_rank = workers.run(run, 2, name)
    for layout in LAYOUTS:
        losses, errors, squares = (Tensor([result[layout][i] for result in by_rank]) for i in range(3))
        assert losses.max() < 0.003, layout
        assert (errors.sum() / squares.sum()).sqrt() < 0.03, layout
