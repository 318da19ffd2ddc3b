"""Frozen weights in every layout: one device's gradients for the rest, and not a bit of theirs moves."""

from typing import Any

import pytest

from megatfm.config import Config, ParallelConfig
from megatfm.verify.verify import verify
from tests.support.frozen_parity import FREEZE, frozen_errors
from tests.support.grids import SLOW, cells_by_ranks
from tests.support.workers import Workers

LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "zero0": ParallelConfig(dp_shard=2, zero=0),
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2),
        "zero3, shards accumulated": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
        "tp2": ParallelConfig(tp=2),
        "pp2": ParallelConfig(pp=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
    },
    4: {
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2),
        "zbv × zero1": ParallelConfig(pp=2, pp_schedule="zbv", dp_shard=2, zero=1),
        "zero2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=2),
    },
}


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    for layout, parallel in layouts.items():
        assert not (actual := frozen_errors(name, parallel)), f"{layout}: {sorted(actual)}"
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), cells_by_ranks(FREEZE, LAYOUTS))
def test_the_rest_is_trained_as_on_one_device(
    workers: Workers, name: str, layouts: list[str], ranks: int
) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=240.0)[0] == layouts


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_shard": 2, "zero": 0}, marks=SLOW),
        {"dp_shard": 2, "zero": 1},
        pytest.param({"dp_shard": 2, "zero": 2}, marks=SLOW),
        {"pp": 2, "pp_schedule": "zbv"},
        {"pp": 2, "dp_shard": 2, "zero": 3},
    ],
    ids=["zero0", "zero1", "zero2", "zbv", "pp2 × zero3"],
)
def test_nothing_is_sent_of_them(parallel: dict[str, Any]) -> None:
    """Every byte is one that the closed forms expect, and these leave frozen gradients out."""
    model = {
        "vocab_size": 512,
        "d_model": 64,
        "n_layers": 4,
        "attention": {"n_heads": 4},
        "ffn": {"d_ff": 128},
    }
    actual = verify(
        Config.model_validate(
            {
                "name": "frozen",
                "model": model,
                "data": {"train": "none", "tokenizer": "none", "sequence_length": 32},
                "optimizer": {"name": "adamw", "lr": 1e-3},
                "train": {
                    "steps": 1,
                    "global_batch": 8,
                    "micro_batch": 2,
                    "freeze": ["decoder.embedding.*", "decoder.layers.0.*", "decoder.layers.1.attn.*"],
                },
                "parallel": {"dp_shard": 1, **parallel},
            }
        )
    )
    assert not actual.wrong
    assert not actual.traffic_mismatches
    still = {one.name for one in actual.gradients if one.norm == 0}
    assert "decoder.layers.0.ffn.w_up.weight" in still
    assert "decoder.layers.1.ffn.w_up.weight" not in still
