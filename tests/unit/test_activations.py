"""What `megatfm describe` says that blocks keep is what they do keep, to the byte."""

from typing import Any

import pytest
import torch

from megatfm.config import Config, ModelConfig, load_config
from megatfm.describe.activations import kept_by_blocks
from megatfm.engines.recompute import measured
from megatfm.layers.moe import dispatch
from megatfm.models import build
from megatfm.models.steps import ForwardPass
from megatfm.parallel.blocks import blocks

ROWS, LENGTH = 3, 24
SMALL = {"vocab_size": 50, "d_model": 32, "n_layers": 4, "attention.n_heads": 4, "ffn.d_ff": 40}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"attention.n_kv_heads": 2},
    "encoder": {"family": "encoder", "dropout": 0.1, "attention.dropout": 0.1, "position.name": "learned",
                "position.max_positions": LENGTH},
    "t5": {"family": "encoder_decoder", "n_encoder_layers": 3, "position.name": "t5"},
    "kinds of blocks": {"blocks": ["wide", "plain"], "block": {"wide": {"ffn": {"d_ff": 80}}, "plain": {}}},
    "experts": {"ffn.name": "moe", "ffn.n_experts": 4, "ffn.top_k": 2, "ffn.n_shared_experts": 1},
    "latent": {"attention.name": "latent", "attention.kv_rank": 7, "attention.rope_dim": 6},
}  # fmt: skip


def config_of(name: str) -> Config:
    config = load_config("quickstart")
    return config.model_copy(
        update={
            "model": ModelConfig.of({**SMALL, **MODELS[name]}),
            "data": config.data.model_copy(update={"sequence_length": LENGTH, "target_length": None}),
            "train": config.train.model_copy(update={"micro_batch": ROWS, "precision": "fp32"}),
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_a_real_pass_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "asks_for_values", lambda tensor: False)  # experts as on a GPU
    config = config_of(name)
    model = build(config.model).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(50, (ROWS, LENGTH))
    batch = ForwardPass({"tokens": tokens, "encoder_tokens": tokens, "keys": torch.arange(ROWS)})
    ours, sizes, inputs = {id(block) for block in blocks(model)}, list[int](), 0
    for step in model.steps:
        run = step.run
        if id(run) in ours:
            made, kept = measured(run, lambda run=run, step=step: run(*step.inputs(batch)))
            sizes.append(kept)
            inputs += ROWS * LENGTH * 32 * 4
            batch.keep(step, made)
        elif step.name != "head":
            batch.keep(step, run(*step.inputs(batch)))
    assert kept_by_blocks(config) == (sum(sizes), inputs + max(sizes))


def test_what_goes_by_blocks_of_keys_keeps_what_a_fused_kernel_does() -> None:
    plain = config_of("decoder")
    window = plain.model.changed({"attention.pattern": {"name": "window", "width": 6}})
    assert kept_by_blocks(plain.model_copy(update={"model": window})) == kept_by_blocks(plain)


def test_what_can_not_be_counted_is_said() -> None:
    assert kept_by_blocks(load_config("longformer-base", ["model.vocab_size=50"])) is None
