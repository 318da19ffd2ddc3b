"""Frozen weights and low-rank adapters in every layout: one device's gradients, and not a bit of the frozen moves."""

from typing import Any

import pytest

from megatfm.config import Config, ModelConfig, ParallelConfig
from megatfm.verify.verify import verify
from tests.support.frozen_parity import DIVISIBLE, FREEZE, LORA, build_adapted, compare_two_steps, frozen_errors
from tests.support.layouts import EXTENDED, SLOW, make_cases_by_ranks
from tests.support.models import FAMILY_MODELS
from tests.support.small_runs import VERIFIED_CONFIG
from tests.support.workers import Workers

LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {"zero0": ParallelConfig(dp_shard=2, zero=0), "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2), "zero3": ParallelConfig(dp_shard=2),
        "zero3, shards accumulated": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
        "tp2": ParallelConfig(tp=2), "pp2": ParallelConfig(pp=2), "zbv": ParallelConfig(pp=2, pp_schedule="zbv")},
    4: {
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2),
        "zbv × zero1": ParallelConfig(pp=2, pp_schedule="zbv", dp_shard=2, zero=1),
        "zero2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=2),
    },
}  # fmt: skip
LONGER = {2: ["zero2", "pp2"], 4: ["zbv × zero1", "zero2 × tp2"]}
"""Layouts of extended cases: of their axes each has a case of its own in `make test`."""
EXPERTS = DIVISIBLE.with_changes({"ffn": {"name": "moe", "n_experts": 12, "top_k": 3, "d_ff": 30, "dropout": 0.0}})
EXPERT_TARGETS = ["experts.w_*", "wv"]


def adapted_config(name: str, **options: object) -> ModelConfig:
    """A small model of a family, with adapters."""
    return FAMILY_MODELS[name].with_changes({"lora": {**LORA, **options}})


def lora_errors(config: ModelConfig, *layouts: ParallelConfig, recomputed: str = "none") -> list[set[str]]:
    """Differences from one device, whose weights plain torch moves, in two steps, by layout."""
    return compare_two_steps(config, build_adapted, layouts, recomputed=recomputed)


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    for layout, errors in zip(layouts, frozen_errors(name, *layouts.values()), strict=True):
        assert not errors, f"{layout}: {sorted(errors)}"
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), make_cases_by_ranks(FREEZE, LAYOUTS, extended=LONGER))
def test_the_rest_is_trained_as_on_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=240.0)[0] == layouts


@pytest.mark.parametrize("parallel", [
    pytest.param({"dp_shard": 2, "zero": 0}, marks=SLOW),
    {"dp_shard": 2, "zero": 1},
    pytest.param({"dp_shard": 2, "zero": 2}, marks=SLOW),
    {"pp": 2, "pp_schedule": "zbv"},
    {"pp": 2, "dp_shard": 2, "zero": 3},
], ids=["zero0", "zero1", "zero2", "zbv", "pp2 × zero3"])  # fmt: skip
def test_gradients_of_frozen_weights_are_not_sent(parallel: dict[str, Any]) -> None:
    """Every byte is one that the closed forms expect, and these leave frozen gradients out."""
    frozen = ("decoder.embedding.*", "decoder.layers.0.*", "decoder.layers.1.attn.*")
    sizes = {"n_layers": 4, "attention": {"n_heads": 4}}
    changes = {"model": VERIFIED_CONFIG["model"] | sizes, "parallel": {"dp_shard": 1, **parallel}}
    changes["train"] = {"steps": 1, "global_batch": 8, "micro_batch": 2, "freeze": frozen}
    actual = verify(Config.model_validate(VERIFIED_CONFIG | changes))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    still = {gradient.name for gradient in actual.gradients if gradient.norm == 0}
    assert "decoder.layers.0.ffn.w_up.weight" in still
    assert "decoder.layers.1.ffn.w_up.weight" not in still


# ------------------------------------------------------------------------------------------ low-rank adapters


ADAPTER_LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {"zero1": ParallelConfig(dp_shard=2, zero=1), "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2), "tp2": ParallelConfig(tp=2),
        "tp2 × sp": ParallelConfig(tp=2, sequence_parallel=True), "pp2": ParallelConfig(pp=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"), "cp2": ParallelConfig(cp=2, zero=0)},
    4: {"tp4, more ranks than key heads": ParallelConfig(tp=4, sequence_parallel=True),
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2), "zero2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=2)},
}  # fmt: skip
LONGER_ADAPTERS = {2: ["zero1", "tp2 × sp", "pp2"], 4: ["pp2 × zero3"]}
MODELS = {
    "llama": adapted_config("llama"),
    "llama, dropout": adapted_config("llama", dropout=0.3),
    "bert": adapted_config("bert", trained=["head.*"]),
    "t5": adapted_config("t5", targets=["wq", "w_down", "cross.wv"]),
}


ODD_LAYOUTS = {
    3: {"zero1": ParallelConfig(dp_shard=3, zero=1), "zero2": ParallelConfig(dp_shard=3, zero=2),
        "zero3": ParallelConfig(dp_shard=3), "tp3": ParallelConfig(tp=3), "cp3": ParallelConfig(cp=3, zero=0)},
    5: {"zero1": ParallelConfig(dp_shard=5, zero=1), "zero3": ParallelConfig(dp_shard=5),
        "tp5": ParallelConfig(tp=5, sequence_parallel=False)},
}  # fmt: skip
LONGER_ODD = {3: ["zero1", "zero2"], 5: ["zero1", "tp5"]}
ODD_MODELS = {
    "divisible": DIVISIBLE.with_changes({"lora": LORA}),
    "divisible, dropout": DIVISIBLE.with_changes({"lora": {**LORA, "dropout": 0.3}}),
}
EXPERT_LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        **{f"zero{zero}": ParallelConfig(dp_shard=2, zero=zero) for zero in (0, 1, 2, 3)},
        **{f"ep2, zero{zero}": ParallelConfig(dp_shard=2, ep=2, zero=zero) for zero in (0, 1, 2, 3)},
        "tp2": ParallelConfig(tp=2), "tp2 by channels": ParallelConfig(tp=2, expert_tp="by_channel"),
        "ep2 of tp2": ParallelConfig(tp=2, ep=2, expert_tp="folded"), "pp2": ParallelConfig(pp=2),
        "cp2": ParallelConfig(cp=2, zero=0),
    },
    3: {
        "zero1": ParallelConfig(dp_shard=3, zero=1), "zero3": ParallelConfig(dp_shard=3, zero=3),
        "ep3, zero0": ParallelConfig(dp_shard=3, ep=3, zero=0), "ep3, zero3": ParallelConfig(dp_shard=3, ep=3),
        "tp3": ParallelConfig(tp=3), "tp3 by channels": ParallelConfig(tp=3, expert_tp="by_channel"),
        "ep3 of tp3": ParallelConfig(tp=3, ep=3, expert_tp="folded"),
    },
    4: {
        "zero3, within experts": ParallelConfig(dp_shard=4),
        "ep2 of 4, zero1": ParallelConfig(dp_shard=4, ep=2, zero=1),
        "ep2 of 4, zero3": ParallelConfig(dp_shard=4, ep=2),
        "ep2 × tp2 without sequence parallel": ParallelConfig(dp_shard=2, ep=2, tp=2, sequence_parallel=False),
        "ep2 × tp2 by channels": ParallelConfig(dp_shard=2, ep=2, tp=2, expert_tp="by_channel"),
        "ep2 of 2 × tp2, zero2": ParallelConfig(dp_shard=2, ep=2, tp=2, zero=2, expert_tp="folded"),
        "ep2 × pp2": ParallelConfig(dp_shard=2, ep=2, pp=2),
    },
    5: {
        "zero3": ParallelConfig(dp_shard=5), "ep5, zero1": ParallelConfig(dp_shard=5, ep=5, zero=1),
        "ep5, zero3": ParallelConfig(dp_shard=5, ep=5),
        "tp5 by channels": ParallelConfig(tp=5, expert_tp="by_channel", sequence_parallel=False),
    },
}  # fmt: skip
LONGER_EXPERTS = {
    2: ["zero0", "zero1", "zero2", "ep2, zero1", "ep2, zero2", "pp2", "cp2"],
    3: ["zero1", "zero3", "ep3, zero0", "tp3", "ep3 of tp3"],
    4: ["zero3, within experts", "ep2 of 4, zero1", "ep2 × tp2 without sequence parallel", "ep2 × pp2"],
    5: [*EXPERT_LAYOUTS[5]],
}
EXPERT_MODELS = {
    "experts": EXPERTS.with_changes({"lora": {**LORA, "targets": EXPERT_TARGETS}}),
    "shared and biased experts": EXPERTS.with_changes({
        "ffn.bias": True, "ffn.activation": "gelu", "ffn.n_shared_experts": 1,
        "lora": {"rank": 10, "alpha": 5.0, "targets": ["ffn.*", "wq"], "trained": ["*.router.weight"]},
    }),
}  # fmt: skip


def compare_adapters(config: ModelConfig, layouts: dict[str, ParallelConfig]) -> list[str]:
    for layout, errors in zip(layouts, lora_errors(config, *layouts.values()), strict=True):
        assert not errors, f"{layout}: {sorted(errors)}"
    return list(layouts)


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"), make_cases_by_ranks(MODELS, ADAPTER_LAYOUTS, extended=LONGER_ADAPTERS)
)
def test_adapters_are_trained_as_on_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: ADAPTER_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_adapters, ranks, MODELS[name], tried, timeout=240.0)[0] == layouts


def recompute_adapters(parallel: ParallelConfig) -> set[str]:
    return lora_errors(ODD_MODELS["divisible, dropout"], parallel, recomputed="selective")[0]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=EXTENDED)])
def test_adapters_of_recomputed_blocks_are_trained_as_on_one_device(workers: Workers, ranks: int) -> None:
    """The products of adapters, beside those whose sums over ranks are saved."""
    assert workers.run(recompute_adapters, ranks, ParallelConfig(tp=ranks)) == [set()] * ranks


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"), make_cases_by_ranks(ODD_MODELS, ODD_LAYOUTS, extended=LONGER_ODD)
)
def test_three_and_five_ranks(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: ODD_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_adapters, ranks, ODD_MODELS[name], tried, timeout=240.0)[0] == layouts


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"), make_cases_by_ranks(EXPERT_MODELS, EXPERT_LAYOUTS, extended=LONGER_EXPERTS)
)
def test_experts_are_adapted_as_on_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: EXPERT_LAYOUTS[ranks][layout] for layout in layouts}
    config = EXPERT_MODELS[name].with_changes({"ffn.n_experts": 10} if ranks == 5 else {})
    assert workers.run(compare_adapters, ranks, config, tried, timeout=300.0)[0] == layouts
