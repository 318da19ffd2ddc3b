"""Low-rank adapters in every layout: one device's gradients, and not a bit of the frozen weights moves."""

import pytest

from megatfm.config import ModelConfig, ParallelConfig
from tests.support.grids import cells_by_ranks
from tests.support.lora_parity import adapted_config, lora_errors
from tests.support.workers import Workers

LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2),
        "tp2": ParallelConfig(tp=2),
        "tp2 × sp": ParallelConfig(tp=2, sequence_parallel=True),
        "pp2": ParallelConfig(pp=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
        "cp2": ParallelConfig(cp=2),
    },
    4: {
        "tp4, more ranks than key heads": ParallelConfig(tp=4, sequence_parallel=True),
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2),
        "zero2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=2),
    },
}
MODELS = {
    "llama": adapted_config("llama"),
    "llama, dropout": adapted_config("llama", dropout=0.3),
    "bert": adapted_config("bert", trained=["head.*"]),
    "t5": adapted_config("t5", targets=["wq", "w_down", "cross.wv"]),
}


def compare(config: ModelConfig, layouts: dict[str, ParallelConfig]) -> list[str]:
    for layout, parallel in layouts.items():
        assert not (actual := lora_errors(config, parallel)), f"{layout}: {sorted(actual)}"
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), cells_by_ranks(MODELS, LAYOUTS))
def test_adapters_are_trained_as_on_one_device(
    workers: Workers, name: str, layouts: list[str], ranks: int
) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, MODELS[name], tried, timeout=240.0)[0] == layouts
