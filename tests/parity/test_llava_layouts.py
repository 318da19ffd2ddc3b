"""Vision-language models under every kind of layout: loss and each gradient as on one device, in float64."""

import pytest

from megatfm.config import ParallelConfig
from tests.support.batches import PassThroughObjective
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
    },
    3: {
        "tp": ParallelConfig(tp=3),
        "tp without sequence parallelism": ParallelConfig(tp=3, sequence_parallel=False),
        "pp": ParallelConfig(pp=3),
    },
    4: {"tp × pp": ParallelConfig(tp=2, pp=2), "tp × zero 3": ParallelConfig(tp=2, dp_shard=2)},
}
RECOMPUTED = ("tp", "zbv", "zero 2")


def compare(ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients by model and layout."""
    wrong = {}
    for name, config in LLAVA_MODELS.items():
        batch = llava_batch(name)
        model, objective, loss = one_device_reference(config, batch, PassThroughObjective)
        for layout, parallel in LAYOUTS[ranks].items():
            recomputed = "full" if layout in RECOMPUTED else "none"
            engine = build_engine(config, parallel, ADAMW, recomputed=recomputed)
            stats = engine.forward_backward(uneven_microbatches(engine, batch), objective)
            assert stats.loss == pytest.approx(loss, rel=1e-12), (name, layout)
            wrong[f"{name}, {layout}"] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_gradients_equal_one_device(workers: Workers, ranks: int) -> None:
    for wrong in workers.run(compare, ranks, ranks, timeout=240.0):
        assert len(wrong) == len(LLAVA_MODELS) * len(LAYOUTS[ranks])
        assert not {case: errors for case, errors in wrong.items() if errors}
