"""Two towers under every kind of layout: loss of the global batch and each gradient as on one device, in float64."""

import pytest

from megatfm.config import ParallelConfig
from tests.support.models import ADAMW
from tests.support.parity import build_engine, model_gradient_errors
from tests.support.tower_models import TOWER_MODELS, TowerObjective, tower_microbatches, tower_reference
from tests.support.workers import Workers

LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "zero 0": ParallelConfig(dp_shard=2, zero=0),
        "zero 1": ParallelConfig(dp_shard=2, zero=1),
        "zero 2": ParallelConfig(dp_shard=2, zero=2),
        "zero 3": ParallelConfig(dp_shard=2),
        "tp 2": ParallelConfig(tp=2),
    },
    3: {
        "zero 1": ParallelConfig(dp_shard=3, zero=1),
        "zero 3": ParallelConfig(dp_shard=3),
        "tp 3": ParallelConfig(tp=3),
        "tp 3 without sequence parallelism": ParallelConfig(tp=3, sequence_parallel=False),
    },
    4: {
        "replicas": ParallelConfig(dp_replicate=2, dp_shard=2),
        "tp 2": ParallelConfig(dp_shard=2, tp=2),
    },
    5: {"zero 0": ParallelConfig(dp_shard=5, zero=0), "zero 3": ParallelConfig(dp_shard=5)},
}


def compare(ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients by model, layout and number of micro-batches."""
    wrong = {}
    for name in TOWER_MODELS:
        model, batch, loss = tower_reference(name)
        for layout, parallel in LAYOUTS[ranks].items():
            for n in (1, 3):
                engine = build_engine(TOWER_MODELS[name], parallel, ADAMW)
                mesh = engine.mesh
                batches = tower_microbatches(batch, mesh.data_rank, mesh.data_ranks, n)
                totals = engine.forward_backward(batches, TowerObjective())
                assert totals.loss == pytest.approx(loss, rel=1e-12), (name, layout, n)
                wrong[f"{name}, {layout}, {n} micro-batches"] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_gradients_equal_one_device(workers: Workers, ranks: int) -> None:
    for wrong in workers.run(compare, ranks, ranks, timeout=240.0):
        assert len(wrong) == 2 * len(TOWER_MODELS) * len(LAYOUTS[ranks])
        assert not {case: errors for case, errors in wrong.items() if errors}
