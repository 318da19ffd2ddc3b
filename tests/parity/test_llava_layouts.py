"""Vision-language models under every kind of layout: loss and each gradient as on one device, in float64."""

import pytest

from megatfm.config import ParallelConfig
from tests.support.batches import PassThroughObjective
from tests.support.grids import cells_by_ranks
from tests.support.llava_models import LLAVA_MODELS, llava_batch
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "zero 0": ParallelConfig(dp_shard=2, zero=0),
        "zero 1": ParallelConfig(dp_shard=2, zero=1),
        "zero 2": ParallelConfig(dp_shard=2, zero=2),
        "zero 3": ParallelConfig(dp_shard=2),
        "replicas": ParallelConfig(dp_replicate=2),
        "tp": ParallelConfig(tp=2),
        "tp without sequence parallelism": ParallelConfig(tp=2, sequence_parallel=False),
        "pp": ParallelConfig(pp=2),
        "pp interleaved": ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
        "pp, cut behind the connector": ParallelConfig(pp=2, pp_split_points=("decoder.embedding",)),
        "pp, cut before the connector": ParallelConfig(pp=2, pp_split_points=("connector",)),
        "cp": ParallelConfig(cp=2),
    },
    3: {
        "tp": ParallelConfig(tp=3),
        "tp without sequence parallelism": ParallelConfig(tp=3, sequence_parallel=False),
        "pp": ParallelConfig(pp=3),
        "cp": ParallelConfig(cp=3),
        "cp by Ulysses": ParallelConfig(cp=3, cp_method="ulysses"),
    },
    4: {
        "tp × pp": ParallelConfig(tp=2, pp=2),
        "tp × zero 3": ParallelConfig(tp=2, dp_shard=2),
        "cp × tp": ParallelConfig(cp=2, tp=2),
        "cp × pp, cut behind the connector": ParallelConfig(
            cp=2, pp=2, pp_split_points=("decoder.embedding",)
        ),
        "cp × zero 3": ParallelConfig(cp=2, dp_shard=2),
    },
}
RECOMPUTED = ("tp", "zbv", "zero 2", "cp by Ulysses")


def compare(name: str, layouts: list[str], ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients of a model by layout."""
    config, batch = LLAVA_MODELS[name], llava_batch(name)
    model, objective, loss = one_device_reference(config, batch, PassThroughObjective)
    wrong = {}
    for layout in layouts:
        recomputed = "full" if layout in RECOMPUTED else "none"
        engine = build_engine(config, LAYOUTS[ranks][layout], ADAMW, recomputed=recomputed)
        stats = engine.forward_backward(uneven_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        wrong[layout] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"),
    cells_by_ranks(LLAVA_MODELS, LAYOUTS, rounds=2, always=["one process", "cp"]),
)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    for wrong in workers.run(compare, ranks, name, layouts, ranks, timeout=240.0):
        assert wrong == {layout: {} for layout in layouts}
