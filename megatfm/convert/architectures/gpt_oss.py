"""gpt-oss: GptOssForCausalLM. Sinks, windows in turn, and experts with biases, whose gates are interleaved."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatfm.config import HeadsAttentionConfig, ModelConfig, expect
from megatfm.convert import layer_types
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import COMMON, Json, alias, idle, only, taken
from megatfm.convert.experts import dropless, top_k_router
from megatfm.convert.keys import rope
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, linear, same
from megatfm.errors import UsageError
from megatfm.layers.activation.clamped_swiglu import ALPHA, LIMIT

THETA = 150_000.0
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Theirs, for a config.json that says nothing of positions."""
KEYS = llama.KEYS | {
    "num_hidden_layers": taken(36),
    "num_local_experts": taken(128),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": taken(4),
    "vocab_size": taken(201088),
    "hidden_size": taken(2880),
    "intermediate_size": taken(2880),
    "head_dim": taken(64),
    "num_attention_heads": taken(64),
    "num_key_value_heads": taken(8),
    "sliding_window": taken(128, int),
    "layer_types": taken(None, list, None),
    "max_position_embeddings": taken(131072),
    "rms_norm_eps": taken(1e-5),
    "attention_dropout": taken(0.0),
    "attention_bias": taken(True),
    "mlp_bias": only(False),
    "swiglu_alpha": only(ALPHA),
    "swiglu_limit": only(LIMIT),
    "bos_token_id": COMMON["bos_token_id"],
    "eos_token_id": COMMON["eos_token_id"],
    **idle("hidden_act"),  # the experts' is always the clamped one
    **idle("output_router_logits", kinds=[bool]),
    **idle("router_aux_loss_coef", kinds=[float]),
    **idle("experts_per_token", "initial_context_length"),
}


def read(theirs: Json) -> ModelConfig:
    if theirs["rope_parameters"] is None and not theirs["rope_scaling"]:
        theirs = theirs | {"rope_parameters": YARN}
    given = theirs["rope_scaling"] or theirs["rope_parameters"] or {}
    if theirs["rope_theta"] is None and "rope_theta" not in given:
        theirs = theirs | {"rope_theta": THETA}
    if theirs["head_dim"] < 1:
        raise UsageError(f"config.json: head_dim = {theirs['head_dim']} is not supported: give one above 0")
    experts = {
        "name": "moe",
        "d_ff": theirs["intermediate_size"],
        "activation": "clamped_swiglu",
        "bias": True,
        "n_experts": theirs["num_local_experts"],
        "top_k": theirs["num_experts_per_tok"],
        "router": {"name": "top_k", "normalise": True, "bias": True},
    }
    window = {"attention": {"pattern": {"name": "window", "width": theirs["sliding_window"]}}}
    return ModelConfig.of(
        {
            "vocab_size": theirs["vocab_size"],
            "d_model": theirs["hidden_size"],
            "n_layers": theirs["num_hidden_layers"],
            "attention.n_heads": theirs["num_attention_heads"],
            "attention.n_kv_heads": theirs["num_key_value_heads"],
            "attention.head_dim": theirs["head_dim"],
            "attention.bias": theirs["attention_bias"],
            "attention.sinks": True,
            "attention.dropout": theirs["attention_dropout"],
            "norm.eps": theirs["rms_norm_eps"],
            "ffn": experts,
            "embedding.tied": theirs["tie_word_embeddings"],
            "init.name": "normal",
            "init.std": theirs["initializer_range"],
            **layer_types.blocks(layer_types.read(theirs, 2), window, {}),
            **rope(theirs),
        }
    )


def write(ours: ModelConfig) -> Json:
    experts = dropless(ours)
    top_k_router(ours)
    without = ("hidden_act", "mlp_bias")
    theirs = llama.write(ours.changed({"ffn.activation": "swiglu"}))
    return {
        **{key: value for key, value in theirs.items() if key not in without},
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": layer_types.window(ours, 128),
        "layer_types": layer_types.write(ours),
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
    }


def rules(config: ModelConfig) -> list[Rule]:
    bias = expect(config.attention, HeadsAttentionConfig, "model.attention").bias
    attention = [
        *(rule for part in "qkvo" for rule in linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)),
        same("attn.core.sinks.weight", "self_attn.sinks"),
    ]
    experts = [
        *linear("ffn.router", "mlp.router", bias=True),
        Rule(("ffn.experts.w_gate", "ffn.experts.w_up"), ("mlp.experts.gate_up_proj",), _in_turn, _parted),
        Rule(
            ("ffn.experts.b_gate", "ffn.experts.b_up"), ("mlp.experts.gate_up_proj_bias",), _in_turn, _parted
        ),
        Rule(("ffn.experts.w_down",), ("mlp.experts.down_proj",), _turned, _turned),
        same("ffn.experts.b_down", "mlp.experts.down_proj_bias"),
    ]
    return llama.rules_around(config, attention, experts)


def _in_turn(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gate and up, [E, F] or [E, F, D], as [E, 2 F] or [E, D, 2 F], one of each in turn."""
    both = torch.stack(list(tensors), dim=2).flatten(1, 2)
    return [both if both.dim() == 2 else both.transpose(1, 2)]


def _parted(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    both = tensors[0] if tensors[0].dim() == 2 else tensors[0].transpose(1, 2)
    return [both[:, ::2], both[:, 1::2]]


def _turned(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors[0].transpose(1, 2)]


ARCHITECTURES.register("GptOssForCausalLM")(
    Architecture(
        "gpt_oss",
        KEYS,
        read,
        write,
        rules,
        prefix="model.",
        length_key="max_position_embeddings",
        marks=llama.MARKS | {"ffn.name": "moe", "attention.sinks": True},
    )
)
register_bare("GptOssModel", ARCHITECTURES.get("GptOssForCausalLM"))
