"""Gemma 2 and the text models of Gemma 3: Gemma2ForCausalLM, Gemma3ForCausalLM.

Both have zero-centered norms before and after sublayers, and alternate windows with full attention. Gemma 2 has soft
caps; Gemma 3 normalises queries and keys, and has rotary bases by layer type.
"""

from megatfm.config import ModelConfig, RopeConfig, ScaledAttention, require_variant
from megatfm.convert.architectures.llama import (
    LLAMA_MAPPING,
    map_attention,
    map_decoder,
    map_dense_ffn,
    register_decoder,
)
from megatfm.convert.hf_config import OPTIONAL_STR, Json, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import (
    GLOBAL,
    LOCAL,
    ROPE_KEYS,
    activation_from_hf,
    activation_to_hf,
    find_window_width,
    make_layer_type_blocks,
    make_window_section,
    read_layer_type_rope,
    read_layer_types,
    read_mapped,
    rope_from_hf,
    rope_to_hf,
    write_layer_type_ropes,
    write_layer_types,
    write_mapped,
)
from megatfm.convert.weight_mapping import WeightMapping, rename_linear
from megatfm.errors import UsageError

GEMMA2_KEYS = ROPE_KEYS | {
    **used(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False, attention_dropout=(0.0, float, None),
        query_pre_attn_scalar=256, sliding_window=(4096, int), layer_types=(None, list, None),
        final_logit_softcapping=(30.0, float, None), attn_logit_softcapping=(50.0, float, None), initializer_range=0.02,
        pad_token_id=(0, int, None), eos_token_id=(1, int, list, None), bos_token_id=(2, int, list, None),
    ),
    **supported_values(use_bidirectional_attention=(None, False)),
    **ignored("hidden_act"),
    **ignored("cache_implementation", kinds=OPTIONAL_STR),
}  # fmt: skip
GEMMA3_KEYS = GEMMA2_KEYS | {
    **used(
        vocab_size=262_208, max_position_embeddings=131_072, final_logit_softcapping=(None, float, None),
        rope_local_base_freq=(None, float), sliding_window_pattern=(None, int),
    ),
    **supported_values(attn_logit_softcapping=None),  # transformers reads it, but does not apply it
    **supported_values(
        use_bidirectional_attention=(False, None), original_max_position_embeddings=None, partial_rotary_factor=None,
    ),
    **ignored("_sliding_window_pattern", kinds=[int]),
}  # fmt: skip
GLOBAL_EVERY, THETA, LOCAL_THETA = 6, 1e6, 1e4
"""Defaults of Gemma 3 in transformers: one in so many blocks has full attention; bases of rotary positions."""


def read_gemma2(hf_config: Json) -> ModelConfig:
    window = make_window_section(hf_config["sliding_window"])
    blocks = make_layer_type_blocks(read_layer_types(hf_config, 2), window, {})
    return _read_gemma(hf_config, {**rope_from_hf(hf_config), **blocks})


def read_gemma3(hf_config: Json) -> ModelConfig:
    global_every = hf_config["sliding_window_pattern"]
    global_every = GLOBAL_EVERY if global_every is None else global_every
    if global_every < 1:
        raise UsageError(f"config.json: sliding_window_pattern = {global_every}: choose 1 or more")
    full = read_layer_type_rope(hf_config, GLOBAL, "rope_theta", THETA, scaled=True)
    local = read_layer_type_rope(hf_config, LOCAL, "rope_local_base_freq", LOCAL_THETA)
    kinds = make_layer_type_blocks(
        read_layer_types(hf_config, global_every),
        {**make_window_section(hf_config["sliding_window"]), "position": local},
        {"position": full},
    )
    return _read_gemma(hf_config, {"attention.qk_norm": True, **kinds})


GEMMA_MAPPING = omit_keys(LLAMA_MAPPING, "mlp_bias") | {"final_logit_softcapping": "lm_head.softcap"}


def _read_gemma(hf_config: Json, extra: Json) -> ModelConfig:
    d_model, n_heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    query_scalar = hf_config["query_pre_attn_scalar"]
    if n_heads < 1 or d_model % n_heads or hf_config["head_dim"] < 1 or query_scalar < 1:
        raise UsageError(
            f"config.json: num_attention_heads = {n_heads} must divide hidden_size = {d_model}, and head_dim = "
            f"{hf_config['head_dim']} and query_pre_attn_scalar = {query_scalar} be above 0"
        )
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if isinstance(hf_config[key], int):
            raise UsageError(f"config.json: {key} = {hf_config[key]}: transformers takes {hf_config[key]}.0 alone")
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, GEMMA_MAPPING),
            "attention.scale": query_scalar**-0.5,
            "attention.softcap": hf_config["attn_logit_softcapping"],
            "attention.dropout": hf_config["attention_dropout"] or 0.0,
            "ffn.activation": activation_from_hf(hf_config["hidden_activation"], gated=True),
            "norm.placement": "sandwich",
            "norm.zero_centered": True,
            "embedding.scale": d_model**0.5,
            "init.name": "normal",
            **extra,
        }
    )


def write_gemma2(config: ModelConfig) -> Json:
    return {**_write_gemma(config), **rope_to_hf(config)}


def write_gemma3(config: ModelConfig) -> Json:
    if not getattr(config.attention, "qk_norm", False):
        raise UsageError("model.attention.qk_norm = false: Gemma 3 normalises queries and keys")
    return {**_write_gemma(config), **write_layer_type_ropes(config, LOCAL_THETA)}


def _write_gemma(config: ModelConfig) -> Json:
    attention = require_variant(config.attention, ScaledAttention, "model.attention")
    require_variant(config.layer_config(0).position, RopeConfig, "model.position")
    scale = attention.scale or config.head_width**-0.5
    activation = activation_to_hf(config.ffn.activation, gated=True)
    return {
        **write_mapped(config, GEMMA_MAPPING),
        "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu_new" else activation,
        "attention_dropout": attention.dropout,
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": find_window_width(config, 4096),
        "layer_types": write_layer_types(config),
        "attn_logit_softcapping": attention.softcap,
    }


def map_gemma(config: ModelConfig) -> list[WeightMapping]:
    block = [
        *rename_linear("attn_residual.norm", "input_layernorm"),
        *map_attention(config),
        *rename_linear("attn_residual.norm_out", "post_attention_layernorm"),
        *rename_linear("ffn_residual.norm", "pre_feedforward_layernorm"),
        *map_dense_ffn("ffn", "mlp"),
        *rename_linear("ffn_residual.norm_out", "post_feedforward_layernorm"),
    ]
    return map_decoder(config, block)


GEMMA_FEATURES = {"norm.placement": "sandwich", "norm.zero_centered": True}
register_decoder("Gemma2", "gemma2", GEMMA2_KEYS, read_gemma2, write_gemma2, map_gemma, features=GEMMA_FEATURES)
register_decoder(
    "Gemma3", "gemma3_text", GEMMA3_KEYS, read_gemma3, write_gemma3, map_gemma,
    features=GEMMA_FEATURES | {"attention.qk_norm": True}, base="Gemma3TextModel",
)  # fmt: skip
