"""gpt-oss (GptOssForCausalLM): attention sinks, alternating windows, and experts with biases and interleaved gates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatfm.config import GQAAttentionConfig, ModelConfig, require_variant
from megatfm.convert.architectures.llama import (
    LLAMA_KEYS,
    LLAMA_MAPPING,
    map_attention,
    map_llama_style,
    register_decoder,
    write_llama,
)
from megatfm.convert.hf_config import COMMON_KEYS, Json, alias, ignored, omit_keys, supported_values, used
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
    WeightMapping,
    map_name,
    map_tensor,
    rename_linear,
    require_dropless,
    require_top_k_router,
)
from megatfm.errors import UsageError
from megatfm.layers.feed_forward import CLAMP, SIGMOID_FACTOR

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
    "bos_token_id": COMMON_KEYS["bos_token_id"],
    "eos_token_id": COMMON_KEYS["eos_token_id"],
    **ignored("hidden_act"),  # experts always have the clamped SwiGLU
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", kinds=[float]),
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
    bias = require_variant(config.attention, GQAAttentionConfig, "model.attention").bias
    attention = [*map_attention(bias=bias), map_name("attn.core.sinks.weight", "self_attn.sinks")]
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
