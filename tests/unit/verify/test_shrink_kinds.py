"""A model whose blocks differ is made small with a block of every kind."""

from megatfm.config import load_config
from megatfm.models import build
from megatfm.verify.shrink import shrink


def test_every_kind_is_kept_and_small() -> None:
    options = {
        "model.n_layers": 8,
        "model.blocks": '["a", "a", "b"]',
        "model.block.a": "{}",
        "model.block.b.ffn.d_ff": 5000,
        "model.block.b.attention.n_heads": 16,
        "model.block.b.attention.n_kv_heads": 4,
        "parallel.tp": 2,
    }
    small, _ = shrink(load_config("quickstart", [f"{key}={value}" for key, value in options.items()]))
    assert small.model.n_layers == 3
    assert [small.model.kind(depth) for depth in range(3)] == ["a", "a", "b"]
    b = small.model.at(2)
    assert (b.attention.n_heads, b.attention.kv_heads) == (16, 4)
    assert b.ffn.d_ff < 100
    assert max(parameter.numel() for parameter in build(small.model).parameters()) < 100_000
