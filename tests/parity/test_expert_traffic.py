"""Tokens that travel to experts: every byte is one that the routers' choices ask for."""

from collections.abc import Callable
from typing import Any

import pytest

from megatfm.config import Config, ParallelConfig
from megatfm.config.objective import CausalObjective, MaskedObjective, SpanCorruptionObjective
from megatfm.verify.verify import verify
from tests.support.expert_models import (
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    PARTS_OF_FOUR,
    WHOLE_ROW_LAYOUTS,
    of_four_ranks,
    tensor_parallel,
)
from tests.support.grids import SLOW
from tests.support.models import MUON
from tests.support.traffic import traffic_config, traffic_mismatches
from tests.support.workers import Workers


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        pytest.param({"tp": 2, "sequence_parallel": False}, marks=SLOW),
        {"dp_shard": -1, "ep": 2},
    ],
)
def test_verify_finds_the_same_computation_and_every_byte(layout: dict[str, Any]) -> None:
    values = {
        "name": "experts",
        "model": EXPERT_MODELS["deepseek-v3"].model_dump(exclude_none=True),
        "data": {"train": "x", "tokenizer": "x", "sequence_length": 32},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10, "global_batch": 4, "micro_batch": 2, "recompute": "full"},
        "parallel": {"dp_shard": 1, **layout},
    }
    actual = verify(Config.model_validate(values))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert not actual.axes_without_closed_form


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "decoder": CausalObjective,
    "encoder": MaskedObjective,
    "encoder_decoder": SpanCorruptionObjective,
}


def traffic_of(name: str, parallel: ParallelConfig, **options: Any) -> Config:
    config = EXPERT_MODELS[name]
    return traffic_config(config, OBJECTIVES[config.family](), parallel, **options)


@pytest.mark.parametrize(
    ("ranks", "second_half"), [(2, False), *PARTS_OF_FOUR, pytest.param(8, False, id="8", marks=SLOW)]
)
def test_tokens_travel_as_the_routers_say(workers: Workers, ranks: int, second_half: bool) -> None:
    """Bytes on each rank, by a count of what the plain model's routers choose."""
    layouts = EXPERT_LAYOUTS[ranks]
    configs = {layout: traffic_of("top-k", parallel) for layout, parallel in layouts.items()}
    muon = layouts["ep2, zero3"] if ranks == 2 else next(iter(layouts.values()))
    configs["muon"] = traffic_of("top-k", muon, optimizer=MUON)
    if ranks < 8:
        configs |= {name: traffic_of(name, list(layouts.values())[-1]) for name in ("deepseek-v3", "switch")}
    if ranks == 2:
        selective = {"recompute": "selective"}
        configs |= {
            f"selective, zero{z}": traffic_of("top-k", layouts[f"ep2, zero{z}"], **selective) for z in (2, 3)
        }
        # Of what tensor-parallel ranks sum in norms over all heads, which selective recomputation keeps.
        configs["selective, tp2"] = traffic_of("deepseek-v3", tensor_parallel(0, dp_shard=1), **selective)
    assert traffic_mismatches(workers, ranks, of_four_ranks(configs, ranks, second_half)) == {}


@pytest.mark.parametrize(("ranks", "second_half"), [(2, False), *PARTS_OF_FOUR])
def test_tokens_travel_between_tensor_parallel_ranks_as_the_routers_say(
    workers: Workers, ranks: int, second_half: bool
) -> None:
    configs = {layout: traffic_of("top-k", parallel) for layout, parallel in EXPERT_TP_LAYOUTS[ranks].items()}
    if ranks == 4:
        configs |= {
            layout: traffic_of("by batch", parallel) for layout, parallel in EXPERT_CONTEXT_LAYOUTS.items()
        }
        limited = {"folded": "ep4 of 2 × tp2, zero3", "channels": "ep2 × tp2 by channels, zero1"}
        for way, layout in limited.items():
            configs[f"switch, {way}"] = traffic_of("switch", EXPERT_TP_LAYOUTS[4][layout], recompute="full")
            configs[f"muon, {way}"] = traffic_of("deepseek-v3", EXPERT_TP_LAYOUTS[4][layout], optimizer=MUON)
        configs |= {
            f"{name}, {layout}, {how}": traffic_of(name, EXPERT_CONTEXT_LAYOUTS[layout], recompute=how)
            for name in ("switch", "deepseek-v3", "expert-choice")
            for layout in WHOLE_ROW_LAYOUTS
            for how in ("none", "full")
        }
        configs["muon × cp"] = traffic_of(
            "by batch", EXPERT_CONTEXT_LAYOUTS["ep4 of 2 × cp2, zero1"], optimizer=MUON
        )
    assert traffic_mismatches(workers, ranks, of_four_ranks(configs, ranks, second_half)) == {}
