"""Blocks that differ: a cycle of kinds over depth, each with its own config."""

import pytest

from megatfm.config import ModelConfig, load_config
from megatfm.errors import UsageError

SMALL = {"vocab_size": 11, "d_model": 8, "n_layers": 5, "attention.n_heads": 2, "ffn.d_ff": 12}
KINDS = {
    "layer_types": ["wide", "wide", "plain"],
    "layer_type.wide.ffn.d_ff": 20,
    "layer_type.wide.position.theta": 500.0,
    "layer_type.plain": {},
}


def test_kinds_are_a_cycle_over_depth() -> None:
    config = ModelConfig.from_dotted({**SMALL, **KINDS})
    assert [config.layer_type_at(depth) for depth in range(5)] == ["wide", "wide", "plain", "wide", "wide"]
    assert [config.layer_config(depth).ffn.d_ff for depth in range(5)] == [20, 20, 12, 20, 20]
    wide = config.layer_config(0)
    assert (wide.position.theta, wide.d_model, wide.layer_types) == (500.0, 8, ())
    assert config.layer_config(2) == config.with_changes({"layer_types": (), "layer_type": {}})


def test_a_kind_may_take_another_variant_of_a_part() -> None:
    config = ModelConfig.from_dotted(
        {
            **SMALL,
            "layer_types": ["none", "own"],
            "layer_type.none.position.name": "none",
            "layer_type.own": {},
        }
    )
    assert [config.layer_config(depth).position.name for depth in range(3)] == ["none", "rope", "none"]


def test_a_plugin_s_keys_can_differ_one_by_one() -> None:
    far = {"layer_types": ["far"], "layer_type.far.attention.pattern.step": 3}
    pattern = {"name": "of_a_plugin", "width": 5, "step": 1}
    config = ModelConfig.from_dotted({**SMALL, "attention.pattern": pattern, **far}).layer_config(0)
    assert config.attention.pattern.model_dump() == pattern | {"step": 3}


def test_without_kinds_all_blocks_are_the_model_s() -> None:
    config = ModelConfig.from_dotted(SMALL)
    assert config.layer_config(3) is config
    assert config.layer_type_at(3) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"layer_types": ["wied", "plain"]},
            r"the kind 'wied' \(did you mean 'wide'\?\).*add \[model.layer_type.wied\]",
        ),
        ({"layer_type.other": {}}, r"layer_type.other is a kind that no block of 5 is of"),
        ({"layer_types": [*["plain"] * 5, "wide"]}, r"layer_type.wide is a kind that no block of 5 is of"),
        (
            {"layer_type.wide.d_model": 16},
            r"layer_type.wide.d_model: blocks of one model can differ in attention, ffn,",
        ),
        ({"layer_type.wide.ffn.d_f": 16}, r"layer_type.wide.*d_f"),
        ({"distinct_layers": 1}, r"distinct_layers uses a block's weights in several layers"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ModelConfig.from_dotted({**SMALL, **KINDS, **change})


def test_kinds_on_the_command_line_and_back_from_a_file() -> None:
    options = [
        'model.layer_types=["wide", "plain"]',
        "model.layer_type.wide.ffn.d_ff=32",
        "model.layer_type.plain={}",
    ]
    config = load_config("quickstart", options)
    assert config.model.layer_config(0).ffn.d_ff == 32
    with pytest.raises(UsageError, match=r"layer_type.wide.*d_ff"):
        load_config("quickstart", [*options, "model.layer_type.wide.ffn.d_ff=-1"])
