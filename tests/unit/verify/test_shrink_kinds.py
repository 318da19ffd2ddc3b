"""A model whose blocks differ is made small with a block of every kind, and what a query sees shrinks with the row."""

import pytest
import torch

from megatfm.config import load_config
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.models import build
from megatfm.verify.reference import take_reference_step
from megatfm.verify.shrink import draw_batch, shrink


def test_every_kind_is_kept_and_small() -> None:
    options = {
        "model.n_layers": 8,
        "model.layer_types": '["a", "a", "b"]',
        "model.layer_type.a": "{}",
        "model.layer_type.b.ffn.d_ff": 5000,
        "model.layer_type.b.attention.n_heads": 16,
        "model.layer_type.b.attention.n_kv_heads": 4,
        "parallel.tp": 2,
    }
    small, _ = shrink(load_config("quickstart", [f"{key}={value}" for key, value in options.items()]))
    assert small.model.n_layers == 3
    assert [small.model.layer_type_at(depth) for depth in range(3)] == ["a", "a", "b"]
    b = small.model.layer_config(2)
    assert (b.attention.n_heads, b.attention.kv_heads) == (16, 4)
    assert b.ffn.d_ff < 100
    assert max(parameter.numel() for parameter in build(small.model).parameters()) < 100_000


PATTERNS = {
    "mistral-7b-v0.1": "model.attention.pattern.width 4096 → 16",
    "gemma2-2b": "model.layer_type.local.attention.pattern.width 4096 → 16",
    "gemma3-1b": "model.layer_type.local.attention.pattern.width 512 → 16",
    "gpt-oss-20b": "model.layer_type.local.attention.pattern.width 128 → 16",
    "modernbert-base": "model.layer_type.local.attention.pattern.width 128 → 16",
    "gpt3-small": "model.layer_type.banded.attention.pattern.width 256 → 16",
    "bigbird-base": "model.attention.pattern.block_size 64 → 4",
    "longformer-base": "model.attention.pattern.width 512 → 16",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_shrink_with_the_row(name: str) -> None:
    small, changes = shrink(load_config(name))
    assert PATTERNS[name] in changes
    assert not any("{" in change for change in changes), "changes are said key by key"
    with torch.device("meta"):
        patterns = {
            module.pattern
            for module in build(small.model).modules()
            if isinstance(module, DotProductAttention)
        }
    assert small.data.sequence_length is not None
    assert any(pattern.simplify(small.data.sequence_length).builtin_mask is None for pattern in patterns)


SIZES = {
    "quickstart data.sequence_length=4096 "
    'model.attention.pattern={name="window",width=128,dilation=3,initial_tokens=4}': {
        "width": 8,
        "dilation": 2,
        "initial_tokens": 2,
    },
    'quickstart model.attention.pattern={name="chunked",size=512} data.sequence_length=1024': {"size": 21},
    'quickstart model.attention.pattern={name="window",width=4096} data.sequence_length=4096': {"width": 64},
    'bert-base model.attention.pattern={name="window",width=1024}': {"width": 128},
    'quickstart model.attention.pattern={name="chunked",size=8192} data.sequence_length=4096': {"size": 128},
    "bigbird-base data.sequence_length=512": {"block_size": 8},
    'quickstart model.attention.pattern={name="strided",stride=128}': {"stride": 8},
    'quickstart model.attention.pattern={name="fixed",stride=128,n_summary_tokens=8}': {
        "stride": 8,
        "n_summary_tokens": 2,
    },
    'quickstart model.attention.pattern={name="bigbird",block_size=64,n_global_tokens=64} data.sequence_length=4096': {
        "block_size": 4,
        "n_global_tokens": 8,
    },
    'bert-base model.attention.pattern={name="longformer",width=512,global_tokens=[0,7,500]}': {
        "global_tokens": (0, 7, 32)
    },
}


@pytest.mark.parametrize("words", SIZES)
def test_sizes_of_patterns(words: str) -> None:
    name, *overrides = words.split(" ")
    small, _ = shrink(load_config(name, overrides))
    pattern = small.model.attention.pattern
    assert {key: getattr(pattern, key) for key in SIZES[words]} == SIZES[words]


def test_unnamed_sizes_become_small() -> None:
    latent = shrink(load_config("deepseek-v3"))[0].model.attention
    assert (latent.kv_lora_rank, latent.q_lora_rank, latent.qk_rope_head_dim, latent.v_head_dim) == (
        32,
        32,
        8,
        8,
    )
    linformer = load_config("bert-base", ['model.attention={name="linformer",n_heads=12,max_length=512}'])
    projected = shrink(linformer)[0].model.attention
    assert (projected.max_length, projected.projected_length) == (64, 8)
    electra = shrink(load_config("electra-large", ["parallel.tp=2"]))[0].model
    assert electra.generator is not None
    assert (electra.generator.d_model, electra.generator.n_heads, electra.generator.d_ff) == (32, 4, 64)
    albert = shrink(load_config("albert-base", ["model.distinct_layers=4"]))[0].model
    assert (albert.distinct_layers, albert.n_layers) == (2, 3)
    small, _ = shrink(load_config("t5-small", ["model.n_encoder_layers=24"]))
    assert small.model.n_encoder_layers == 2


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "longformer-base", "t-dmca"])
def test_cores_of_their_own_kind_have_a_reference(name: str) -> None:
    small, _ = shrink(load_config(name))
    assert take_reference_step(small, draw_batch(small)).loss > 0
