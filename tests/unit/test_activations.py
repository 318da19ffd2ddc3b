"""What `megatfm describe` says that blocks keep is what they do keep, to the byte."""

from functools import partial
from typing import Any

import pytest
import torch

from megatfm.config import Config, ModelConfig, load_config
from megatfm.describe.activation_memory import block_activation_bytes
from megatfm.engines.activation_checkpointing import measure_saved_bytes
from megatfm.layers.moe import experts
from megatfm.models import build
from megatfm.parallel.layout import replace_forward, transformer_blocks

ROWS, LENGTH = 3, 24
SMALL = {"vocab_size": 50, "d_model": 32, "n_layers": 4, "attention.n_heads": 4, "ffn.d_ff": 40}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"attention.n_kv_heads": 2},
    "encoder": {"family": "encoder", "dropout": 0.1, "attention.dropout": 0.1, "position.name": "learned",
                "position.max_positions": LENGTH},
    "t5": {"family": "encoder_decoder", "n_encoder_layers": 3, "position.name": "t5"},
    "kinds of blocks": {"n_layers": 8, "layer_types": ["wide", "plain"],
                        "layer_type": {"wide": {"ffn": {"d_ff": 80}}, "plain": {}}},
    "experts": {"ffn.name": "moe", "ffn.n_experts": 4, "ffn.top_k": 2, "ffn.n_shared_experts": 1},
    "electra": {"family": "electra", "generator": {"d_model": 16, "n_heads": 4, "d_ff": 24}, "embedding.dim": 16,
                "n_layers": 3},
    "latent": {"attention.name": "mla", "attention.kv_lora_rank": 7, "attention.qk_rope_head_dim": 6},
}  # fmt: skip


def config_of(name: str) -> Config:
    config = load_config("quickstart")
    return config.model_copy(
        update={
            "model": ModelConfig.from_dotted({**SMALL, **MODELS[name]}),
            "data": config.data.model_copy(update={"sequence_length": LENGTH, "target_length": None}),
            "train": config.train.model_copy(update={"micro_batch": ROWS, "precision": "fp32"}),
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_counted_activations_are_those_that_a_real_pass_keeps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "is_host_readable", lambda tensor: False)  # experts as on a GPU
    config = config_of(name)
    model = build(config.model).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(50, (ROWS, LENGTH))
    sizes, inputs = list[int](), 0

    def of_block(block, forward, x_BTD, *args):
        nonlocal inputs
        result, kept = measure_saved_bytes(block, lambda: forward(x_BTD, *args))
        sizes.append(kept)
        inputs += x_BTD.nbytes
        return result

    for block in transformer_blocks(model):
        replace_forward(block, partial(of_block, block, block.forward))
    fields = {"encoder_decoder": ("encoder_tokens",), "electra": ("targets", "original")}
    names = ("tokens", *fields.get(config.model.family, ()))
    model(**dict.fromkeys(names, tokens), keys=torch.arange(ROWS))
    assert block_activation_bytes(config) == (sum(sizes), inputs + max(sizes))


def test_what_goes_by_blocks_of_keys_keeps_what_a_fused_kernel_does() -> None:
    plain = config_of("decoder")
    window = plain.model.with_changes({"attention.pattern": {"name": "window", "width": 6}})
    assert block_activation_bytes(plain.model_copy(update={"model": window})) == block_activation_bytes(plain)


def test_attention_with_dropout_is_counted_as_without() -> None:
    """GPT-2's goes by blocks of keys on a CPU, where they are as long as these rows."""
    changes = {"position": {"name": "learned", "max_positions": 2048}, "dropout": 0.1}
    config = config_of("decoder")
    config = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": 2048})})
    models = [config.model.with_changes({**changes, "attention.dropout": rate}) for rate in (0.0, 0.1)]
    plain, dropped = (block_activation_bytes(config.model_copy(update={"model": model})) for model in models)
    assert plain is not None
    assert dropped == plain


def test_what_can_not_be_counted_is_said() -> None:
    assert block_activation_bytes(load_config("longformer-base", ["model.vocab_size=50"])) is None
