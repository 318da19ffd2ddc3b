"""Stacks of blocks that differ, against blocks put together by hand."""

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.plugins import plugin

SMALL = {"vocab_size": 23, "d_model": 16, "n_layers": 3, "attention.n_heads": 2, "ffn.d_ff": 24}
plugin("dilated")
KINDS = {
    "layer_types": ["near", "far"],
    "layer_type.near.attention.pattern": {"name": "dilated", "width": 2, "step": 2},
    "layer_type.near.position.theta": 100.0,
    "layer_type.far": {"ffn.d_ff": 40, "attention.n_kv_heads": 1, "position.name": "none"},
}


def test_blocks_are_as_their_kind_says() -> None:
    config = ModelConfig.from_dotted({**SMALL, **KINDS})
    model = build(config).double()
    initialise(model, 3)
    blocks = list(model.decoder.layers.values())
    assert [block.kind for block in blocks] == ["near", "far", "near"]
    assert [block.depth for block in blocks] == [0, 1, 2]
    assert [block.ffn.w_up.weight.shape[0] for block in blocks] == [24, 40, 24]
    assert [block.attn.wk.weight.shape[0] for block in blocks] == [16, 8, 16]
    near = plugin("dilated").Dilated(2, 2, causal=True)
    assert [block.attn.core.pattern == near for block in blocks] == [True, False, True]

    # Each block alone, from a model of its kind only, with the same weights.
    tokens = torch.arange(12).view(2, 6)
    x = model.decoder.embedding.tokens(tokens)
    for depth, block in enumerate(blocks):
        alone = build(config.layer_config(depth).with_changes({"n_layers": 1})).double().decoder.layers["0"]
        alone.load_state_dict(block.state_dict())
        x = alone(x, SequenceMetadata(torch.arange(6).expand(2, 6)))
    torch.testing.assert_close(model(tokens).hidden, model.decoder.norm(x))


def test_turned_positions_differ_by_block() -> None:
    """Blocks of one width, whose tables of angles must not be taken for one another's."""
    model = build(ModelConfig.from_dotted({**SMALL, **KINDS, "layer_type.far": {}}))
    initialise(model, 3)
    other = build(
        ModelConfig.from_dotted(
            {**SMALL, **KINDS, "layer_type.far": {}, "layer_type.near.position.theta": 10_000.0}
        )
    )
    other.load_state_dict(model.state_dict())
    tokens = torch.arange(12).view(2, 6)
    assert not torch.allclose(model(tokens).logits, other(tokens).logits)


def test_some_blocks_without_a_shared_bias() -> None:
    config = ModelConfig.from_dotted(
        {**SMALL, "position.name": "t5", "layer_types": ["biased", "bare"], "layer_type.biased": {}}
        | {"layer_type.bare.position.name": "none"}
    )
    model = build(config)
    initialise(model, 3)
    assert model.decoder.has_position_bias == [True, False, True]
    assert model(torch.arange(6)[None]).logits.isfinite().all()


def test_a_stack_s_encoding_for_one_kind_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^model.layer_type.a.position: t5 is shared by all blocks of a stack"
    ):
        build(ModelConfig.from_dotted({**SMALL, "layer_types": ["a"], "layer_type.a.position.name": "t5"}))
