"""Every model family cut into pipeline stages: the gradients of one device, with dropout on, under every schedule."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import ModelConfig, OptimizerSection, ParallelConfig
from megatfm.engines import NativeEngine, Sharing
from megatfm.models import build
from megatfm.ops.initial import initialise
from megatfm.parallel.mesh import build_mesh
from megatfm.parallel.pipeline_cut import cut, keep
from megatfm.parallel.plan import lay
from megatfm.parallel.plans import PLANS
from megatfm.train.optimizers import optimizer_groups
from tests.parity.test_families import MODELS, PassOn, batch_for
from tests.parity.test_layouts import ADAMW, LENGTH, ROWS, block
from tests.workers import Workers

LENGTHS = {"tokens": LENGTH, "encoder_tokens": LENGTH}


def make_engine(
    config: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerSection = ADAMW
) -> NativeEngine:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with torch.device("meta"):
        model = build(config)
    optimizers = optimizer_groups(optimizer, model)
    layout = lay(model, PLANS.get(config.family), mesh, sequence_parallel=parallel.sequence_parallel)
    pipeline = cut(
        model,
        parallel.schedule,
        parallel.pp,
        parallel.stages_per_rank,
        lengths=LENGTHS,
        at=parallel.cuts,
        sequence_parts=parallel.tp if parallel.sequence_parallel else 1,
    )
    keep(model, pipeline.mine(mesh.rank("pp")))
    return NativeEngine(
        model,
        layout,
        mesh,
        device=torch.device("cpu"),
        precision="fp64",
        seed=7,
        optimizers=optimizers,
        sharing=Sharing(parallel.zero, parallel.accumulate),
        pipeline=pipeline,
    )


def microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows in micro-batches of one or two, the last of one row alone."""
    rows = ROWS // engine.mesh.data_ranks
    mine = {key: value[engine.mesh.data_rank * rows :][:rows] for key, value in batch.items()}
    bounds = [*range(0, rows - 1, 2), rows - 1, rows]
    return [
        {key: value[a:b] for key, value in mine.items()} for a, b in pairwise(bounds)
    ]


def reference(config: ModelConfig, batch: dict[str, Tensor]) -> tuple[nn.Module, PassOn, float]:
    """One device: the model with its gradients, the objective and the loss."""
    model = build(config).double().train()
    initialise(model, 7)
    terms = PassOn([])(model, batch)
    objective = PassOn(list(terms))
    counts = objective.counts(batch)
    assert min(counts.values()) > 0
    loss = torch.stack([objective.weights[term] * terms[term] / counts[term] for term in terms]).sum()
    loss.backward()
    return model, objective, float(loss.detach())


def errors(engine: NativeEngine, model: nn.Module) -> dict[str, float]:
    """Of the gradients that are held here, those that are wrong."""
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    floor = 1e-6 * torch.cat([g.flatten() for g in expected.values()]).norm()
    found = {
        name: float((g - block(engine, name, expected[name])).norm() / max(expected[name].norm(), floor))
        for name, g in engine.gradients().items()
    }
    assert found.keys() == engine.local.keys()
    return {name: error for name, error in found.items() if not error <= 1e-9}


def compare(name: str, parallel: ParallelConfig) -> set[str]:
    config = MODELS[name]
    batch = batch_for(config)
    model, objective, loss = reference(config, batch)
    engine = make_engine(config, parallel)
    for n, parameter in model.named_parameters():
        if n in engine.local:
            assert torch.equal(block(engine, n, parameter.detach()), engine.local[n]), f"initial {n} differs"
    for _ in range(2):  # a second step finds nothing left of the first
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12)
        assert errors(engine, model) == {}
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert engine.step(0.0, clip=0.0) == pytest.approx(float(norm), rel=1e-12)
    return set(engine.local)


SCHEDULES = {
    "pp2": (2, ParallelConfig(pp=2)),
    "pp2 gpipe": (2, ParallelConfig(pp=2, schedule="gpipe")),
}


@pytest.mark.parametrize("layout", SCHEDULES)
@pytest.mark.parametrize("name", ["llama"])
def test_gradients_equal_one_device(workers: Workers, name: str, layout: str) -> None:
    ranks, parallel = SCHEDULES[layout]
    held = workers.run(compare, ranks, name, parallel)
    with torch.device("meta"):
        assert set().union(*held) == {n for n, _ in build(MODELS[name]).named_parameters()}
