"""Llama-like decoders with experts in all blocks: MixtralForCausalLM, OlmoeForCausalLM, Qwen3MoeForCausalLM."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

from megatfm.config import GQAAttentionConfig, ModelConfig, require_variant
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.llama import (
    LLAMA_FINGERPRINT,
    LLAMA_KEYS,
    MISTRAL_KEYS,
    ROTARY_BUFFERS,
    map_attention,
    map_llama_style,
    map_qk_norms,
    read_llama,
    read_mistral,
    write_llama,
    write_mistral,
)
from megatfm.convert.hf_config import COMMON_KEYS, Json, Key, alias, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import set_default_theta
from megatfm.convert.weight_mapping import (
    ExpertNames,
    WeightMapping,
    make_top_k_moe_section,
    map_experts,
    rename_linear,
    require_dropless,
    require_top_k_router,
)
from megatfm.errors import UsageError


class _MapFusableWeights(Protocol):
    def __call__(self, config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]: ...


def _register(
    name: str,
    model_type: str,
    keys: Mapping[str, Key],
    read: Callable[[Json], ModelConfig],
    write: Callable[[ModelConfig], Json],
    map_weights: _MapFusableWeights,
    *,
    ignored_tensors: tuple[str, ...] = (),
    fingerprint: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Register a decoder with experts in all blocks. name: of its classes, without "Model" or "ForCausalLM"."""
    architecture = Architecture(
        model_type,
        keys,
        read,
        write,
        map_weights,
        map_fused_weights=partial(map_weights, fused=True),
        base_model_prefix="model.",
        ignored_tensors=ignored_tensors,
        max_length_key="max_position_embeddings",
        fingerprint={**LLAMA_FINGERPRINT, "ffn.name": "moe", **fingerprint},
    )
    register_architecture(f"{name}ForCausalLM", architecture, base=f"{name}Model")


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
MIXTRAL_THETA = 1e6
"""Default of transformers for a config.json without a rotary base."""
MIXTRAL_KEYS = MISTRAL_KEYS | {
    "rms_norm_eps": used(1e-5),
    "sliding_window": used(None, int, None),
    "num_local_experts": used(8),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": used(2),
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", "router_jitter_noise", kinds=[float]),
}


def _read_mixtral(hf_config: Json) -> ModelConfig:
    dense = read_mistral(set_default_theta(hf_config, MIXTRAL_THETA))
    experts = make_top_k_moe_section(
        hf_config, hf_config["num_local_experts"], dense.ffn.d_ff, dense.ffn.activation, normalise=True
    )
    return dense.with_changes({"ffn": experts})


def _write_mixtral(config: ModelConfig) -> Json:
    router, experts = require_top_k_router(config), require_dropless(config)
    if not router.norm_topk_prob:
        raise UsageError("model.ffn.router.norm_topk_prob = false: Mixtral's weights add up to 1")
    return {
        **write_mistral(config),
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
    }


def _map_mixtral(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    bias = require_variant(config.attention, GQAAttentionConfig, "model.attention").bias
    attention = map_attention(bias=bias)
    return map_llama_style(config, attention, map_experts(config, MIXTRAL_NAMES, fused=fused))


_register(
    "Mixtral",
    "mixtral",
    MIXTRAL_KEYS,
    _read_mixtral,
    _write_mixtral,
    _map_mixtral,
    ignored_tensors=ROTARY_BUFFERS,
)

# OLMoE normalises queries and keys over all heads together.

OLMOE_KEYS = LLAMA_KEYS | {
    "vocab_size": used(50304),
    "hidden_size": used(2048),
    "intermediate_size": used(2048),
    "num_hidden_layers": used(16),
    "num_attention_heads": used(16),
    "max_position_embeddings": used(4096),
    "rms_norm_eps": used(1e-5),
    "attention_dropout": used(0.0),
    "clip_qkv": supported_values(None),
    "mlp_bias": supported_values(False),
    "pad_token_id": used(1, int, None),
    "bos_token_id": COMMON_KEYS["bos_token_id"],
    "eos_token_id": used(50279, int, list, None),
    "num_experts": used(64),
    "num_local_experts": alias("num_experts"),
    "num_experts_per_tok": used(8),
    "norm_topk_prob": used(False),
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", kinds=[float]),
}


def _read_olmoe(hf_config: Json) -> ModelConfig:
    dense = read_llama(hf_config)
    if hf_config["head_dim"] not in (None, dense.d_model // dense.attention.n_heads):
        raise UsageError(
            f"config.json: head_dim = {hf_config['head_dim']}: OLMoE's norms of queries and keys are as wide as "
            "hidden_size: leave it out"
        )
    experts = make_top_k_moe_section(
        hf_config,
        hf_config["num_experts"],
        dense.ffn.d_ff,
        dense.ffn.activation,
        normalise=hf_config["norm_topk_prob"],
    )
    return dense.with_changes({"ffn": experts, "attention.qk_norm": "all_heads"})


def _write_olmoe(config: ModelConfig) -> Json:
    router, experts = require_top_k_router(config), require_dropless(config)
    return {
        **omit_keys(write_llama(config), "mlp_bias", "head_dim"),
        "clip_qkv": None,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.norm_topk_prob,
    }


def _map_olmoe(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    bias = bool(getattr(config.attention, "bias", False))
    attention = [
        *map_attention(bias=bias),
        *(mapping for part in "qk" for mapping in rename_linear(f"attn.w{part}_norm", f"self_attn.{part}_norm")),
    ]
    return map_llama_style(config, attention, map_experts(config, ExpertNames(), fused=fused))


_register(
    "Olmoe",
    "olmoe",
    OLMOE_KEYS,
    _read_olmoe,
    _write_olmoe,
    _map_olmoe,
    ignored_tensors=ROTARY_BUFFERS,
    fingerprint={"attention.qk_norm": "all_heads"},
)

# Qwen3 normalises queries and keys head by head.

QWEN3_MOE_KEYS = LLAMA_KEYS | {
    "vocab_size": used(151936),
    "hidden_size": used(2048),
    "intermediate_size": used(6144),  # of dense blocks, of which there are none
    "num_hidden_layers": used(24),
    "num_key_value_heads": used(4),
    "head_dim": used(None, int),
    "max_position_embeddings": used(32768),
    "attention_bias": supported_values(False),
    "qkv_bias": supported_values(False),
    "use_qk_norm": supported_values(True),
    "mlp_bias": supported_values(False),
    "attention_dropout": used(0.0),
    "bos_token_id": COMMON_KEYS["bos_token_id"],
    "eos_token_id": COMMON_KEYS["eos_token_id"],
    "num_local_experts": used(128),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": used(8),
    "moe_intermediate_size": used(768),
    "norm_topk_prob": used(False),
    "decoder_sparse_step": supported_values(1),
    "mlp_only_layers": supported_values([], None),
    "shared_expert_intermediate_size": supported_values(0),
    "use_sliding_window": supported_values(False),
    **ignored("sliding_window", "max_window_layers", kinds=[int, None]),
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", kinds=[float]),
}


def _read_qwen3_moe(hf_config: Json) -> ModelConfig:
    dense = read_llama(hf_config)
    experts = make_top_k_moe_section(
        hf_config,
        hf_config["num_local_experts"],
        hf_config["moe_intermediate_size"],
        dense.ffn.activation,
        normalise=hf_config["norm_topk_prob"],
    )
    return dense.with_changes({"ffn": experts, "attention.qk_norm": True})


def _write_qwen3_moe(config: ModelConfig) -> Json:
    router, experts = require_top_k_router(config), require_dropless(config)
    return {
        **omit_keys(write_llama(config), "mlp_bias"),
        "moe_intermediate_size": experts.d_ff,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _map_qwen3_moe(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    attention = [*map_attention(), *map_qk_norms()]
    return map_llama_style(config, attention, map_experts(config, ExpertNames(), fused=fused))


_register(
    "Qwen3Moe",
    "qwen3_moe",
    QWEN3_MOE_KEYS,
    _read_qwen3_moe,
    _write_qwen3_moe,
    _map_qwen3_moe,
    fingerprint={"attention.qk_norm": True},
)
