"""DeepSeek-V3 (DeepseekV3ForCausalLM): latent attention; the first blocks are dense, the others have experts. V2 and
V2-Lite (DeepseekV2ForCausalLM) have a softmax router, which ranks groups by their best expert.

One matrix projects latents to keys and values, ordered by head. Rotary channels are pairs of neighbours, not halves.
"""

from collections.abc import Container, Mapping, Sequence
from functools import partial
from math import log

import torch
from torch import Tensor

from megatfm.config import MLAAttentionConfig, ModelConfig, RopeConfig, RopeScaling, require_variant
from megatfm.config.ffn import DeepSeekV2RouterConfig, DeepSeekV3RouterConfig, MoEConfig
from megatfm.config.position import YarnScaling
from megatfm.convert.architectures.llama import (
    LLAMA_MAPPING,
    check_head_count,
    map_dense_ffn,
    map_llama_style,
    register_decoder,
)
from megatfm.convert.hf_config import Json, alias, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import (
    ROPE_KEYS,
    activation_from_hf,
    activation_to_hf,
    check_implied_values,
    read_mapped,
    read_n_layers,
    rope_from_hf,
    rope_to_hf,
    write_mapped,
)
from megatfm.convert.weight_mapping import (
    ExpertNames,
    WeightMapping,
    map_experts,
    map_name,
    rename_linear,
    require_dropless,
)
from megatfm.errors import UsageError

DEEPSEEK_V3_KEYS = ROPE_KEYS | {
    **used(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, first_k_dense_replace=3,
        num_attention_heads=128, num_key_value_heads=(128, int, None), qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, q_lora_rank=(1536, int, None), kv_lora_rank=512, head_dim=(None, int), qk_head_dim=(None, int),
        max_position_embeddings=4096, hidden_act="silu", attention_dropout=(0.0, float, None), initializer_range=0.02,
        tie_word_embeddings=False, bos_token_id=(0, int, list, None), eos_token_id=(1, int, list, None),
        moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, n_group=8,
        topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    **supported_values(rms_norm_eps=1e-6),  # the norms of latents always use this one
    **supported_values(
        attention_bias=False, rope_interleave=True, sliding_window=None, moe_layer_freq=1, scoring_func="sigmoid",
        topk_method="noaux_tc",
    ),
    **alias(num_local_experts="n_routed_experts"),
    # Settings of training and inference, and heads for later tokens.
    **ignored(
        "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers",
    ),
}  # fmt: skip
MAX_MTP_MODULES = 64
"""More multi-token-prediction modules than any model has."""


def read_deepseek_v3(hf_config: Json) -> ModelConfig:
    router = {
        "name": "deepseek_v3",
        "n_group": hf_config["n_group"],
        "topk_group": hf_config["topk_group"],
        "norm_topk_prob": hf_config["norm_topk_prob"],
        "routed_scaling_factor": hf_config["routed_scaling_factor"],
    }
    config = read_with_router(hf_config, router)
    if config.layer_types and hf_config["n_routed_experts"] < 2 * hf_config["n_group"]:
        raise UsageError(
            f"config.json: n_group = {hf_config['n_group']} of n_routed_experts = {hf_config['n_routed_experts']}: "
            "transformers ranks groups by their two best experts, and a group has fewer"
        )
    return config


def list_unused_tensors(hf_config: Mapping[str, object], names: Container[str]) -> list[str]:
    """Return patterns of the multi-token-prediction modules after the last block, which no class of transformers
    reads."""
    first = hf_config.get("num_hidden_layers", DEEPSEEK_V3_KEYS["num_hidden_layers"].default)
    count = hf_config.get("num_nextn_predict_layers", hf_config.get("num_mtp_layers"))
    if not isinstance(first, int) or not isinstance(count, int) or count < 1:
        return []
    indices = range(first, first + min(count, MAX_MTP_MODULES))
    return [rf"^model\.layers\.{i}\." for i in indices if f"model.layers.{i}.eh_proj.weight" in names]


NOT_IN_DEEPSEEK = ("num_key_value_heads", "head_dim", "intermediate_size", "attention_bias", "mlp_bias")
DEEPSEEK_MAPPING = omit_keys(LLAMA_MAPPING, *NOT_IN_DEEPSEEK) | {
    key: f"attention.{key}" for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank")
}
DEEPSEEK_FEATURES = {"attention.name": "mla"}


def read_with_router(hf_config: Json, router: Json) -> ModelConfig:
    """Read a config with a given `router` section; DeepSeek-V2 has the same keys."""
    check_implied_values(hf_config, head_dim=hf_config["qk_rope_head_dim"])
    check_implied_values(hf_config, qk_head_dim=hf_config["qk_nope_head_dim"] + hf_config["qk_rope_head_dim"])
    n_layers, heads = read_n_layers(hf_config), hf_config["num_attention_heads"]
    if hf_config["num_key_value_heads"] not in (None, heads):
        raise UsageError("config.json: num_key_value_heads must be num_attention_heads")
    rotary = rope_from_hf(hf_config)
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, DEEPSEEK_MAPPING),
            "ffn.d_ff": hf_config["intermediate_size"],
            "ffn.activation": activation_from_hf(hf_config["hidden_act"], gated=True),
            "attention.name": "mla",
            "attention.v_head_dim": hf_config["v_head_dim"],
            "attention.scale": _read_attention_scale(hf_config, rotary["position.scaling"]),
            "attention.dropout": hf_config["attention_dropout"] or 0.0,
            "init.name": "normal",
            **rotary,
            **_make_layer_types(hf_config, n_layers, router),
        }
    )


def _read_attention_scale(hf_config: Json, scaling: RopeScaling | None) -> float | None:
    """Return the scale of attention scores if YaRN changes it, for channels without positions too; else None."""
    table = hf_config["rope_scaling"] or hf_config["rope_parameters"] or {}
    mscale_all_dim = table.get("mscale_all_dim")
    if not isinstance(scaling, YarnScaling) or not mscale_all_dim:
        return None
    if isinstance(mscale_all_dim, bool) or not isinstance(mscale_all_dim, int | float):
        raise UsageError(f"config.json: mscale_all_dim = {mscale_all_dim!r} is no number")
    plain_scale = _compute_plain_scale(hf_config["qk_nope_head_dim"], hf_config["qk_rope_head_dim"])
    return float(plain_scale * _compute_yarn_mscale(scaling, mscale_all_dim) ** 2)


def _compute_plain_scale(*widths: int) -> float:
    return float(sum(widths) ** -0.5)


def _compute_yarn_mscale(scaling: YarnScaling, multiplier: float) -> float:
    return 0.1 * multiplier * log(max(scaling.factor, 1.0)) + 1.0


def _convert_rope_to_hf(config: ModelConfig) -> Json:
    """Return rope_parameters with mscale_all_dim, as `_read_attention_scale` reads it. Raises UsageError."""
    latent, hf_config = _get_attention(config), rope_to_hf(config)
    scaling = config.position.scaling if isinstance(config.position, RopeConfig) else None
    if latent.scale is None:
        return hf_config
    if not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
        raise UsageError(f"model.attention.scale = {latent.scale}: here transformers has one with YaRN alone")
    mscale = (latent.scale / _compute_plain_scale(config.head_width, latent.qk_rope_head_dim)) ** 0.5
    hf_config["rope_parameters"]["mscale_all_dim"] = (mscale - 1) / (0.1 * log(scaling.factor))
    return hf_config


def _make_layer_types(hf_config: Json, n_layers: int, router: Json) -> Json:
    """Return megatfm's layer types: dense blocks, then blocks with experts."""
    n_dense = max(hf_config["first_k_dense_replace"], 0)
    if n_dense >= n_layers:
        return {}
    experts = {
        "name": "moe",
        "d_ff": hf_config["moe_intermediate_size"],
        "activation": activation_from_hf(hf_config["hidden_act"], gated=True),
        "n_experts": hf_config["n_routed_experts"],
        "top_k": hf_config["num_experts_per_tok"],
        "n_shared_experts": hf_config["n_shared_experts"],
        "router": router,
    }
    return {
        "layer_types": ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense),
        **({"layer_type.dense": {}} if n_dense else {}),
        "layer_type.sparse": {"ffn": experts},
    }


def write_deepseek_v3(config: ModelConfig) -> Json:
    hf_config = write_without_router(config)
    for block in list_sparse_blocks(config)[:1]:
        router = require_variant(require_dropless(block).router, DeepSeekV3RouterConfig, "model.ffn.router")
        hf_config |= {
            "n_group": router.n_group,
            "topk_group": router.topk_group,
            "norm_topk_prob": router.norm_topk_prob,
            "routed_scaling_factor": router.routed_scaling_factor,
        }
    return hf_config | {"num_nextn_predict_layers": 0}


def list_sparse_blocks(config: ModelConfig) -> list[ModelConfig]:
    """Return the configs of the blocks with experts."""
    return [layer for layer in map(config.layer_config, range(config.n_layers)) if isinstance(layer.ffn, MoEConfig)]


def write_without_router(config: ModelConfig) -> Json:
    """Write config.json without the router's keys."""
    latent = _get_attention(config)
    if config.norm.eps != 1e-6:
        raise UsageError("model.norm.eps must be 1e-6: transformers' norms of latents have no other")
    return {
        **write_mapped(config, DEEPSEEK_MAPPING),
        **_convert_experts_to_hf(config),
        "num_key_value_heads": config.attention.n_heads,
        "v_head_dim": latent.v_head_dim or config.head_width,
        "intermediate_size": config.layer_config(0).ffn.d_ff,
        "hidden_act": activation_to_hf(config.ffn.activation, gated=True),
        "attention_dropout": config.attention.dropout,
        **_convert_rope_to_hf(config),
    }


def _convert_experts_to_hf(config: ModelConfig) -> Json:
    ffns = [config.layer_config(depth).ffn for depth in range(config.n_layers)]
    sparse = [depth for depth, ffn in enumerate(ffns) if isinstance(ffn, MoEConfig)]
    hf_config: Json = {"first_k_dense_replace": sparse[0] if sparse else config.n_layers}
    if not sparse:
        return hf_config
    experts = require_dropless(config.layer_config(sparse[0]))
    if not experts.n_shared_experts:
        raise UsageError("model.ffn.n_shared_experts = 0: DeepSeek's blocks have at least one")
    return {
        **hf_config,
        "moe_intermediate_size": experts.d_ff,
        "n_routed_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": experts.n_shared_experts,
    }


def map_deepseek_v3(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    latent = _get_attention(config)
    n_heads, nope_dim, rope_dim = config.attention.n_heads, config.head_width, latent.qk_rope_head_dim
    v_dim = latent.v_head_dim or config.head_width
    q_down = [
        *rename_linear("attn.wq_down", "self_attn.q_a_proj"),
        *rename_linear("attn.q_norm", "self_attn.q_a_layernorm"),
    ]
    q_name = "self_attn.q_b_proj.weight" if latent.q_lora_rank else "self_attn.q_proj.weight"

    def reorder_rotary(order: Sequence[int], tensor: Tensor) -> Tensor:
        """Reorder the rotary rows of each head, [heads · (nope_dim + rope_dim), d_in]."""
        heads = tensor.unflatten(0, (-1, nope_dim + rope_dim))
        return torch.cat([heads[:, :nope_dim], heads[:, nope_dim:][:, list(order)]], dim=1).flatten(0, 1)

    def join_kv(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        keys, values = tensors[0].unflatten(0, (n_heads, nope_dim)), tensors[1].unflatten(0, (n_heads, v_dim))
        return [torch.cat([keys, values], dim=1).flatten(0, 1)]

    def split_kv(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        heads = tensors[0].unflatten(0, (n_heads, nope_dim + v_dim))
        return [heads[:, :nope_dim].flatten(0, 1), heads[:, nope_dim:].flatten(0, 1)]

    attention = [
        *(q_down if latent.q_lora_rank else []),
        WeightMapping(
            ("attn.wq.weight",),
            (q_name,),
            lambda tensors: [reorder_rotary(_order_halves_to_pairs(rope_dim), tensors[0])],
            lambda tensors: [reorder_rotary(_order_pairs_to_halves(rope_dim), tensors[0])],
        ),
        WeightMapping(
            ("attn.wkv_down.weight", "attn.wk_rope.weight"),
            ("self_attn.kv_a_proj_with_mqa.weight",),
            lambda tensors: [torch.cat([tensors[0], tensors[1][_order_halves_to_pairs(rope_dim)]])],
            lambda tensors: [tensors[0][:-rope_dim], tensors[0][-rope_dim:][_order_pairs_to_halves(rope_dim)]],
        ),
        map_name("attn.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
        WeightMapping(("attn.wk.weight", "attn.wv.weight"), ("self_attn.kv_b_proj.weight",), join_kv, split_kv),
        map_name("attn.wo.weight", "self_attn.o_proj.weight"),
    ]
    ffns = [_map_ffn(config.layer_config(depth), fused=fused) for depth in range(config.n_layers)]
    return map_llama_style(config, attention, *ffns)


def _map_ffn(config: ModelConfig, *, fused: bool) -> list[WeightMapping]:
    if not isinstance(config.ffn, MoEConfig):
        return map_dense_ffn("ffn", "mlp")
    corrected = [map_name("ffn.router.bias", "mlp.gate.e_score_correction_bias")]
    return [
        *corrected * isinstance(config.ffn.router, DeepSeekV3RouterConfig),
        *map_dense_ffn("ffn.shared", "mlp.shared_experts"),
        *map_experts(config, ExpertNames(), fused=fused),
    ]


def _order_pairs_to_halves(width: int) -> list[int]:
    """Return the order 0, 2, …, 1, 3, …, which turns pairs of neighbours into halves."""
    return [*range(0, width, 2), *range(1, width, 2)]


def _order_halves_to_pairs(width: int) -> list[int]:
    """Return the inverse of `_order_pairs_to_halves`."""
    return [half * width // 2 + i for i in range(width // 2) for half in (0, 1)]


def _get_attention(config: ModelConfig) -> MLAAttentionConfig:
    return require_variant(config.attention, MLAAttentionConfig, "model.attention")


register_decoder(
    "DeepseekV3", "deepseek_v3", DEEPSEEK_V3_KEYS, read_deepseek_v3, write_deepseek_v3, map_deepseek_v3,
    features=DEEPSEEK_FEATURES, map_fused_weights=partial(map_deepseek_v3, fused=True),
    unused_tensors=list_unused_tensors,
)  # fmt: skip

# DeepSeek-V2

GREEDY, LIMITED = "greedy", "group_limited_greedy"
V3_ONLY_KEYS = ("rope_interleave", "scoring_func", "num_local_experts", "num_nextn_predict_layers", "num_mtp_layers")
DEEPSEEK_V2_KEYS = omit_keys(DEEPSEEK_V3_KEYS, *V3_ONLY_KEYS) | {
    **used(
        vocab_size=102400, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, first_k_dense_replace=0,
        num_attention_heads=32, num_key_value_heads=(None, int, None), max_position_embeddings=2048,
        bos_token_id=(1, int, list, None), eos_token_id=(2, int, list, None), moe_intermediate_size=1407,
        n_routed_experts=64, num_experts_per_tok=(None, int), n_shared_experts=2, n_group=(None, int, None),
        topk_group=(None, int, None), routed_scaling_factor=1.0,
    ),
    **supported_values(mlp_bias=False, topk_method=(GREEDY, LIMITED), scoring_func="softmax"),
    **alias(num_experts="n_routed_experts"),
    **ignored("norm_topk_prob", kinds=[bool, None]),  # transformers never normalises
    **ignored("router_aux_loss_coef"),
}  # fmt: skip


def read_deepseek_v2(hf_config: Json) -> ModelConfig:
    check_head_count(hf_config)
    has_experts = hf_config["first_k_dense_replace"] < hf_config["num_hidden_layers"]
    required = ["num_experts_per_tok"] + ["n_group", "topk_group"] * (hf_config["topk_method"] == LIMITED)
    for key in required if has_experts else ():
        if hf_config[key] is None:
            raise UsageError(f"config.json: {key} is not there: say how many")
    groups = {"n_group": hf_config["n_group"], "topk_group": hf_config["topk_group"]}
    router = {
        "name": "deepseek_v2",
        "routed_scaling_factor": hf_config["routed_scaling_factor"],
        **(groups if hf_config["topk_method"] == LIMITED else {}),
    }
    return read_with_router(hf_config, router)


def write_deepseek_v2(config: ModelConfig) -> Json:
    hf_config = write_without_router(config)
    for block in list_sparse_blocks(config)[:1]:
        router = require_variant(require_dropless(block).router, DeepSeekV2RouterConfig, "model.ffn.router")
        is_limited = router.n_group > 1
        hf_config |= {
            "topk_method": LIMITED if is_limited else GREEDY,
            "n_group": router.n_group,
            "topk_group": router.topk_group,
            "routed_scaling_factor": router.routed_scaling_factor,
            "norm_topk_prob": False,
        }
    return hf_config


register_decoder(
    "DeepseekV2", "deepseek_v2", DEEPSEEK_V2_KEYS, read_deepseek_v2, write_deepseek_v2, map_deepseek_v3,
    features=DEEPSEEK_FEATURES, map_fused_weights=partial(map_deepseek_v3, fused=True),
)  # fmt: skip
