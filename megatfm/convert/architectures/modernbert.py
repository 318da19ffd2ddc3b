"""ModernBERT (Warner et al. 2024): ModernBertForMaskedLM.

Blocks have a window, every third one full attention. The first block's attention has no norm, since the embedding has
one.
"""

from megatfm.config import GQAAttentionConfig, ModelConfig, require_variant
from megatfm.config.model_parts import LayerNormConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.hf_config import Json, ignored, supported_values, used
from megatfm.convert.hf_values import (
    GLOBAL,
    LOCAL,
    ROPE_KEYS,
    activation_from_hf,
    activation_to_hf,
    check_implied_values,
    find_window_width,
    make_layer_type_blocks,
    make_window_section,
    read_layer_type_rope,
    read_layer_types,
    read_mapped,
    write_layer_type_ropes,
    write_layer_types,
    write_mapped,
)
from megatfm.convert.weight_mapping import WeightMapping, concat, map_layers, map_name, rename_linear
from megatfm.errors import UsageError

MODERNBERT_KEYS = {
    **used(
        vocab_size=50368, hidden_size=768, intermediate_size=1152, num_hidden_layers=22, num_attention_heads=12,
        hidden_activation="gelu", classifier_activation="gelu", max_position_embeddings=8192, norm_eps=1e-5,
        norm_bias=False, attention_bias=False, mlp_bias=False, classifier_bias=False, decoder_bias=True,
        attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0, layer_types=(None, list, None),
        global_attn_every_n_layers=(None, int), local_attention=128, initializer_range=0.02,
        global_rope_theta=(None, float), local_rope_theta=(None, float), pad_token_id=(50283, int, None),
        eos_token_id=(50282, int, list, None), bos_token_id=(50281, int, list, None),
    ),
    **supported_values(
        tie_word_embeddings=True, rope_scaling=None, rope_theta=None, partial_rotary_factor=None,
        original_max_position_embeddings=None, sparse_prediction=False, sliding_window=None,
    ),
    "rope_parameters": ROPE_KEYS["rope_parameters"],
    **ignored("initializer_cutoff_factor", "sparse_pred_ignore_index", "classifier_pooling", "position_embedding_type"),
    **ignored("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "gradient_checkpointing"),
    **ignored("layer_norm_eps"),
}  # fmt: skip
DEFAULT_PAD_ID = 50283
"""Default padding id in transformers, which needs an embedding."""
GLOBAL_EVERY, THETA, LOCAL_THETA = 3, 160_000.0, 10_000.0
"""Defaults in transformers: one in so many blocks, the first of them, has full attention; bases of rotary positions."""


MODERNBERT_MAPPING = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "embedding_dropout": "dropout",
    "num_attention_heads": "attention.n_heads",
    "attention_dropout": "attention.dropout",
    "intermediate_size": "ffn.d_ff",
    "mlp_bias": "ffn.bias",
    "mlp_dropout": "ffn.dropout",
    "norm_eps": "norm.eps",
    "decoder_bias": "lm_head.bias",
    "classifier_bias": "lm_head.transform_bias",
    "initializer_range": "init.std",
}


def read_modernbert(hf_config: Json) -> ModelConfig:
    check_implied_values(hf_config, classifier_activation=hf_config["hidden_activation"])
    global_every = hf_config["global_attn_every_n_layers"]
    global_every = GLOBAL_EVERY if global_every is None else global_every
    width, local = hf_config["hidden_size"], hf_config["local_attention"]
    if global_every < 1 or local < 2 or width % max(hf_config["num_attention_heads"], 1):
        raise UsageError(
            f"config.json: global_attn_every_n_layers = {global_every} and local_attention = {local} must be above 0 "
            f"and 1, and num_attention_heads divide hidden_size = {width}"
        )
    if hf_config["pad_token_id"] is not None and not 0 <= hf_config["pad_token_id"] < hf_config["vocab_size"]:
        raise UsageError(
            f"config.json: pad_token_id = {hf_config['pad_token_id']} is no token of vocab_size = "
            f"{hf_config['vocab_size']}"
        )
    local_rope = read_layer_type_rope(hf_config, LOCAL, "local_rope_theta", LOCAL_THETA)
    global_rope = read_layer_type_rope(hf_config, GLOBAL, "global_rope_theta", THETA)
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, MODERNBERT_MAPPING),
            "family": "encoder",
            "attention.bias": hf_config["attention_bias"],
            "ffn.activation": activation_from_hf(hf_config["hidden_activation"], gated=True),
            "norm.name": "layer_norm",
            "norm.bias": hf_config["norm_bias"],
            "norm.first_attention_norm": False,
            "embedding.norm": True,
            "lm_head.name": "transform",
            "init.name": "bert",
            **make_layer_type_blocks(
                read_layer_types(hf_config, global_every, first=GLOBAL),
                {**make_window_section(local // 2 * 2), "position": local_rope},
                {"position": global_rope},
            ),
        }
    )


def write_modernbert(config: ModelConfig) -> Json:
    activation = activation_to_hf(config.ffn.activation, gated=True)
    return {
        **write_mapped(config, MODERNBERT_MAPPING),
        "hidden_activation": activation,
        "classifier_activation": activation,
        "norm_bias": require_variant(config.norm, LayerNormConfig, "model.norm").bias,
        "attention_bias": require_variant(config.attention, GQAAttentionConfig, "model.attention").bias,
        "layer_types": write_layer_types(config),
        "local_attention": find_window_width(config, 128),
        **write_layer_type_ropes(config, LOCAL_THETA),
        **({} if (config.vocab_size or 0) > DEFAULT_PAD_ID else {"pad_token_id": None}),
    }


def map_modernbert(config: ModelConfig) -> list[WeightMapping]:
    d_model, d_ff = config.d_model, config.ffn.d_ff
    norm_bias = require_variant(config.norm, LayerNormConfig, "model.norm").bias
    bias = require_variant(config.attention, GQAAttentionConfig, "model.attention").bias

    def norm(megatfm_name: str, hf_name: str) -> list[WeightMapping]:
        return rename_linear(megatfm_name, hf_name, bias=norm_bias)

    def stack(names: list[str], hf_name: str, size: int, *, with_bias: bool) -> list[WeightMapping]:
        return [
            concat([f"{name}.{key}" for name in names], f"{hf_name}.{key}", [size] * len(names))
            for key in ("weight", *["bias"] * with_bias)
        ]

    block = [
        *stack([f"attn.w{part}" for part in "qkv"], "attn.Wqkv", d_model, with_bias=bias),
        *rename_linear("attn.wo", "attn.Wo", bias=bias),
        *norm("ffn_residual.norm", "mlp_norm"),
        *stack(["ffn.w_gate", "ffn.w_up"], "mlp.Wi", d_ff, with_bias=config.ffn.bias),
        *rename_linear("ffn.w_down", "mlp.Wo", bias=config.ffn.bias),
    ]
    block_with_norm = [*norm("attn_residual.norm", "attn_norm"), *block]
    blocks = [block, *[block_with_norm] * (config.n_layers - 1)]
    return [
        map_name(
            "encoder.embedding.tokens.weight", "model.embeddings.tok_embeddings.weight", copies=["decoder.weight"]
        ),
        *norm("encoder.embedding.norm", "model.embeddings.norm"),
        *map_layers(config.n_layers, "encoder.layers.", "model.layers.", *blocks),
        *norm("encoder.norm", "model.final_norm"),
        *rename_linear("head.transform.dense", "head.dense", bias=config.lm_head.transform_bias),
        *norm("head.transform.norm", "head.norm"),
        *([map_name("head.bias", "decoder.bias")] if config.lm_head.bias else []),
    ]


register_architecture(
    "ModernBertForMaskedLM",
    Architecture(
        "modernbert",
        MODERNBERT_KEYS,
        read_modernbert,
        write_modernbert,
        map_modernbert,
        base_model_prefix="model.",
        max_length_key="max_position_embeddings",
        fingerprint={"family": "encoder", "position.name": "rope", "norm.first_attention_norm": False},
    ),
    base="ModernBertModel",
)
