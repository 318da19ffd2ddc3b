"""Blocks that differ: a cycle of kinds over depth, each with its own config."""

import pytest

from megatfm.config import ModelConfig, load_config
from megatfm.errors import UsageError

SMALL = {"vocab_size": 11, "d_model": 8, "n_layers": 5, "attention.n_heads": 2, "ffn.d_ff": 12}
KINDS = {
    "blocks": ["wide", "wide", "plain"],
    "block.wide.ffn.d_ff": 20,
    "block.wide.position.theta": 500.0,
    "block.plain": {},
}


def test_kinds_are_a_cycle_over_depth() -> None:
    config = ModelConfig.from_dotted({**SMALL, **KINDS})
    assert [config.layer_type_at(depth) for depth in range(5)] == ["wide", "wide", "plain", "wide", "wide"]
    assert [config.layer_config(depth).ffn.d_ff for depth in range(5)] == [20, 20, 12, 20, 20]
    wide = config.layer_config(0)
    assert (wide.position.theta, wide.d_model, wide.blocks) == (500.0, 8, ())
    assert config.layer_config(2) == config.with_changes({"blocks": (), "block": {}})


def test_a_kind_may_take_another_variant_of_a_part() -> None:
    config = ModelConfig.from_dotted(
        {**SMALL, "blocks": ["none", "own"], "block.none.position.name": "none", "block.own": {}}
    )
    assert [config.layer_config(depth).position.name for depth in range(3)] == ["none", "rope", "none"]


def test_a_plugin_s_keys_can_differ_one_by_one() -> None:
    far = {"blocks": ["far"], "block.far.attention.pattern.step": 3}
    pattern = {"name": "of_a_plugin", "width": 5, "step": 1}
    config = ModelConfig.from_dotted({**SMALL, "attention.pattern": pattern, **far}).layer_config(0)
    assert config.attention.pattern.model_dump() == pattern | {"step": 3}


def test_without_kinds_all_blocks_are_the_model_s() -> None:
    config = ModelConfig.from_dotted(SMALL)
    assert config.layer_config(3) is config
    assert config.layer_type_at(3) is None


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"blocks": ["wied", "plain"]},
            r"the kind 'wied' \(did you mean 'wide'\?\).*add \[model.block.wied\]",
        ),
        ({"block.other": {}}, r"block.other is a kind that no block of 5 is of"),
        ({"blocks": [*["plain"] * 5, "wide"]}, r"block.wide is a kind that no block of 5 is of"),
        (
            {"block.wide.d_model": 16},
            r"block.wide.d_model: blocks of one model can differ in attention, ffn,",
        ),
        ({"block.wide.ffn.d_f": 16}, r"block.wide.*d_f"),
        ({"distinct_layers": 1}, r"distinct_layers uses a block's weights in several layers"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        ModelConfig.from_dotted({**SMALL, **KINDS, **change})


def test_kinds_on_the_command_line_and_back_from_a_file() -> None:
    options = ['model.blocks=["wide", "plain"]', "model.block.wide.ffn.d_ff=32", "model.block.plain={}"]
    config = load_config("quickstart", options)
    assert config.model.layer_config(0).ffn.d_ff == 32
    with pytest.raises(UsageError, match=r"block.wide.*d_ff"):
        load_config("quickstart", [*options, "model.block.wide.ffn.d_ff=-1"])
