"""Decoders with experts in all blocks: MixtralForCausalLM, OlmoeForCausalLM, Qwen3MoeForCausalLM, GptOssForCausalLM."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.convert.architectures.llama import (
    ANY_TOKEN_IDS,
    LLAMA_KEYS,
    LLAMA_MAPPING,
    MISTRAL_KEYS,
    ROTARY_BUFFERS,
    map_attention,
    map_llama_style,
    read_llama,
    read_mistral,
    register_decoder,
    write_llama,
    write_mistral,
)
from megatfm.convert.hf_config import Json, alias, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import (
    find_window_width,
    make_layer_type_blocks,
    make_window_section,
    read_layer_types,
    read_mapped,
    rope_from_hf,
    set_default_theta,
    write_layer_types,
)
from megatfm.convert.weight_mapping import (
    ExpertNames,
    WeightMapping,
    map_experts,
    map_name,
    map_tensor,
    rename_linear,
    require_dropless,
    require_top_k_router,
)
from megatfm.errors import UsageError
from megatfm.layers.feed_forward import CLAMP, SIGMOID_FACTOR

EXPERT_NAMES = ExpertNames()
ROUTER_LOSS_KEYS = ignored("output_router_logits", kinds=[bool]) | ignored("router_aux_loss_coef", kinds=[float])


def _add_experts(dense: ModelConfig, hf_config: Json, **changes: object) -> ModelConfig:
    """Return a config with experts in place of its dense network, without loss coefficients: transformers' coefficient
    scales another sum."""
    experts = {
        "name": "moe",
        "d_ff": hf_config.get("moe_intermediate_size", dense.ffn.d_ff),
        "activation": dense.ffn.activation,
        "n_experts": hf_config["num_experts" if "num_experts" in hf_config else "num_local_experts"],
        "top_k": hf_config["num_experts_per_tok"],
        "router": {"name": "top_k", "norm_topk_prob": hf_config.get("norm_topk_prob", True)},
    }
    return dense.with_changes({"ffn": experts, **changes})


def _write_experts(config: ModelConfig) -> Json:
    """Return the keys about experts that OLMoE and Qwen3 share. Raises UsageError for another router or capacities."""
    router, experts = require_top_k_router(config), require_dropless(config)
    return {
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.norm_topk_prob,
    }


def _map_moe(config: ModelConfig, *, names: ExpertNames = EXPERT_NAMES, fused: bool = False) -> list[WeightMapping]:
    """Map a Llama with experts in all blocks. fused: all experts of a block in one tensor, which has no `names`."""
    return map_llama_style(config, map_attention(config), map_experts(config, names, fused=fused))


_map_fused_moe = partial(_map_moe, fused=True)

MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
MIXTRAL_THETA = 1e6
"""Default of transformers for a config.json without a rotary base."""
MIXTRAL_KEYS = MISTRAL_KEYS | {
    **used(rms_norm_eps=1e-5, sliding_window=(None, int, None), num_local_experts=8, num_experts_per_tok=2),
    **alias(num_experts="num_local_experts"),
    **ROUTER_LOSS_KEYS,
    **ignored("router_jitter_noise", kinds=[float]),
}


def _read_mixtral(hf_config: Json) -> ModelConfig:
    return _add_experts(read_mistral(set_default_theta(hf_config, MIXTRAL_THETA)), hf_config)


def _write_mixtral(config: ModelConfig) -> Json:
    router, experts = require_top_k_router(config), require_dropless(config)
    if not router.norm_topk_prob:
        raise UsageError("model.ffn.router.norm_topk_prob = false: Mixtral's weights add up to 1")
    return {**write_mistral(config), "num_local_experts": experts.n_experts, "num_experts_per_tok": experts.top_k}


register_decoder(
    "Mixtral", "mixtral", MIXTRAL_KEYS, _read_mixtral, _write_mixtral, partial(_map_moe, names=MIXTRAL_NAMES),
    features={"ffn.name": "moe"}, map_fused_weights=_map_fused_moe, ignored_tensors=ROTARY_BUFFERS,
)  # fmt: skip

# OLMoE normalises queries and keys over all heads together.

OLMOE_KEYS = LLAMA_KEYS | {
    **ANY_TOKEN_IDS,
    **used(
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        max_position_embeddings=4096, rms_norm_eps=1e-5, attention_dropout=0.0, pad_token_id=(1, int, None),
        eos_token_id=(50279, int, list, None), num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
    ),
    **supported_values(clip_qkv=None, mlp_bias=False),
    **alias(num_local_experts="num_experts"),
    **ROUTER_LOSS_KEYS,
}  # fmt: skip


def _read_olmoe(hf_config: Json) -> ModelConfig:
    dense = read_llama(hf_config)
    if hf_config["head_dim"] not in (None, dense.d_model // dense.attention.n_heads):
        raise UsageError(
            f"config.json: head_dim = {hf_config['head_dim']}: OLMoE's norms of queries and keys are as wide as "
            "hidden_size: leave it out"
        )
    return _add_experts(dense, hf_config, **{"attention.qk_norm": "all_heads"})


def _write_olmoe(config: ModelConfig) -> Json:
    return {**omit_keys(write_llama(config), "mlp_bias", "head_dim"), "clip_qkv": None, **_write_experts(config)}


register_decoder(
    "Olmoe", "olmoe", OLMOE_KEYS, _read_olmoe, _write_olmoe, _map_moe,
    features={"ffn.name": "moe", "attention.qk_norm": "all_heads"}, map_fused_weights=_map_fused_moe,
    ignored_tensors=ROTARY_BUFFERS,
)  # fmt: skip

# Qwen3 normalises queries and keys head by head.

QWEN3_MOE_KEYS = LLAMA_KEYS | {
    **used(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=24, num_key_value_heads=4, head_dim=(None, int),
        max_position_embeddings=32768, attention_dropout=0.0, num_local_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=False,
    ),
    **used(intermediate_size=6144),  # of dense blocks, of which there are none
    **supported_values(
        attention_bias=False, qkv_bias=False, use_qk_norm=True, mlp_bias=False, decoder_sparse_step=1,
        mlp_only_layers=([], None), shared_expert_intermediate_size=0, use_sliding_window=False,
    ),
    **ANY_TOKEN_IDS,
    **alias(num_experts="num_local_experts"),
    **ignored("sliding_window", "max_window_layers", kinds=[int, None]),
    **ROUTER_LOSS_KEYS,
}  # fmt: skip


def _read_qwen3_moe(hf_config: Json) -> ModelConfig:
    return _add_experts(read_llama(hf_config), hf_config, **{"attention.qk_norm": True})


def _write_qwen3_moe(config: ModelConfig) -> Json:
    return {
        **omit_keys(write_llama(config), "mlp_bias"),
        **_write_experts(config),
        "moe_intermediate_size": config.ffn.d_ff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


register_decoder(
    "Qwen3Moe", "qwen3_moe", QWEN3_MOE_KEYS, _read_qwen3_moe, _write_qwen3_moe, _map_moe,
    features={"ffn.name": "moe", "attention.qk_norm": True}, map_fused_weights=_map_fused_moe,
)  # fmt: skip

# gpt-oss has attention sinks, alternating windows, and experts with biases and interleaved gates.

DEFAULT_THETA = 150_000.0
DEFAULT_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Default of transformers for a config.json without rope_parameters."""
GPT_OSS_KEYS = LLAMA_KEYS | {
    **used(
        num_hidden_layers=36, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088, hidden_size=2880,
        intermediate_size=2880, head_dim=64, num_attention_heads=64, num_key_value_heads=8, sliding_window=(128, int),
        layer_types=(None, list, None), max_position_embeddings=131072, rms_norm_eps=1e-5, attention_dropout=0.0,
        attention_bias=True,
    ),
    **alias(num_experts="num_local_experts"),
    **supported_values(mlp_bias=False, swiglu_alpha=SIGMOID_FACTOR, swiglu_limit=CLAMP),
    **ANY_TOKEN_IDS,
    **ignored("hidden_act"),  # experts always have the clamped SwiGLU
    **ROUTER_LOSS_KEYS,
    **ignored("experts_per_token", "initial_context_length"),
}  # fmt: skip


def read_gpt_oss(hf_config: Json) -> ModelConfig:
    if hf_config["rope_parameters"] is None and not hf_config["rope_scaling"]:
        hf_config = hf_config | {"rope_parameters": DEFAULT_YARN}
    hf_config = set_default_theta(hf_config, DEFAULT_THETA)
    if hf_config["head_dim"] < 1:
        raise UsageError(f"config.json: head_dim = {hf_config['head_dim']} is not supported: give one above 0")
    experts = {
        "name": "moe",
        "d_ff": hf_config["intermediate_size"],
        "activation": "clamped_swiglu",
        "bias": True,
        "n_experts": hf_config["num_local_experts"],
        "top_k": hf_config["num_experts_per_tok"],
        "router": {"name": "top_k", "norm_topk_prob": True, "bias": True},
    }
    window = make_window_section(hf_config["sliding_window"])
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, omit_keys(LLAMA_MAPPING, "intermediate_size", "mlp_bias")),
            "attention.sinks": True,
            "attention.dropout": hf_config["attention_dropout"],
            "ffn": experts,
            "init.name": "normal",
            **make_layer_type_blocks(read_layer_types(hf_config, 2), window, {}),
            **rope_from_hf(hf_config),
        }
    )


def write_gpt_oss(config: ModelConfig) -> Json:
    experts = require_dropless(config)
    require_top_k_router(config)
    hf_config = write_llama(config.with_changes({"ffn.activation": "swiglu"}))
    return {
        **omit_keys(hf_config, "hidden_act", "mlp_bias"),
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": find_window_width(config, 128),
        "layer_types": write_layer_types(config),
        "swiglu_alpha": SIGMOID_FACTOR,
        "swiglu_limit": CLAMP,
    }


def map_gpt_oss(config: ModelConfig) -> list[WeightMapping]:
    attention = [*map_attention(config), map_name("attn.core.sinks.weight", "self_attn.sinks")]
    experts = [
        *rename_linear("ffn.router", "mlp.router", bias=True),
        *(
            WeightMapping(
                (f"ffn.experts.{kind}_gate", f"ffn.experts.{kind}_up"),
                (f"mlp.experts.gate_up_proj{suffix}",),
                interleave_gate_up,
                deinterleave_gate_up,
            )
            for kind, suffix in (("w", ""), ("b", "_bias"))
        ),
        map_tensor("ffn.experts.w_down", "mlp.experts.down_proj", swap_dims, swap_dims),
        map_name("ffn.experts.b_down", "mlp.experts.down_proj_bias"),
    ]
    return map_llama_style(config, attention, experts)


def interleave_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Interleave gate and up projections: [E, F, D] → [E, D, 2 F], biases [E, F] → [E, 2 F]."""
    interleaved = torch.stack(list(tensors), dim=2).flatten(1, 2)
    return [interleaved if interleaved.dim() == 2 else interleaved.transpose(1, 2)]


def deinterleave_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split interleaved gate and up projections, the inverse of `interleave_gate_up`."""
    gate_up = tensors[0] if tensors[0].dim() == 2 else tensors[0].transpose(1, 2)
    return [gate_up[:, ::2], gate_up[:, 1::2]]


def swap_dims(weight: Tensor) -> Tensor:
    """Swap the input and the output dim of each expert's weight, [E, F, D] ↔ [E, D, F]."""
    return weight.transpose(1, 2)


register_decoder(
    "GptOss", "gpt_oss", GPT_OSS_KEYS, read_gpt_oss, write_gpt_oss, map_gpt_oss,
    features={"ffn.name": "moe", "attention.sinks": True},
)  # fmt: skip
