"""Llama 1 to 3, Mistral, Qwen2 and Qwen3: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.

Rotary channels are halves on both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatfm.config import GQAAttentionConfig, ModelConfig, WindowPatternConfig, require_variant
from megatfm.convert.architecture import Architecture, MapWeights, register_architecture
from megatfm.convert.hf_config import COMMON_KEYS, Json, Key, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import (
    LOCAL,
    ROPE_KEYS,
    activation_from_hf,
    activation_to_hf,
    read_layer_types,
    read_mapped,
    rope_from_hf,
    rope_to_hf,
    write_mapped,
)
from megatfm.convert.weight_mapping import WeightMapping, map_layers, map_name, rename_linear, rename_modules
from megatfm.errors import UsageError

LLAMA_KEYS: dict[str, Key] = ROPE_KEYS | {
    **used(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=(None, int, None), head_dim=(None, int, None), max_position_embeddings=2048,
        rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False, mlp_bias=False,
        attention_dropout=(0.0, float, None), initializer_range=0.02, tie_word_embeddings=False,
        bos_token_id=(1, int, list, None), eos_token_id=(2, int, list, None),
    ),
    **supported_values(sliding_window=None),
    **ignored("max_sequence_length"),
}  # fmt: skip
LLAMA_FINGERPRINT = {"family": "decoder", "position.name": "rope", "attention.name": "gqa", "ffn.name": "dense"}
LLAMA_MAPPING = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "attention.n_heads",
    "num_key_value_heads": "attention.n_kv_heads",
    "head_dim": "attention.head_dim",
    "intermediate_size": "ffn.d_ff",
    "rms_norm_eps": "norm.eps",
    "attention_bias": "attention.bias",
    "mlp_bias": "ffn.bias",
    "tie_word_embeddings": "embedding.tied",
    "initializer_range": "init.std",
}


def read_llama(hf_config: Json) -> ModelConfig:
    check_head_count(hf_config)
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, LLAMA_MAPPING),
            "ffn.activation": activation_from_hf(hf_config["hidden_act"], gated=True),
            "attention.dropout": hf_config["attention_dropout"] or 0.0,
            "init.name": "normal",
            **rope_from_hf(hf_config),
        }
    )


def check_head_count(hf_config: Json) -> None:
    """Raise UsageError for a number of heads that transformers' config classes refuse."""
    width, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    if heads < 1 or width % heads:
        raise UsageError(
            f"config.json: num_attention_heads = {heads} does not divide hidden_size = {width}, as transformers asks "
            "whatever head_dim is"
        )


def write_llama(config: ModelConfig) -> Json:
    return {
        **write_mapped(config, LLAMA_MAPPING),
        "hidden_act": activation_to_hf(config.ffn.activation, gated=True),
        "attention_dropout": config.attention.dropout,
        **rope_to_hf(config),
    }


def map_llama(config: ModelConfig) -> list[WeightMapping]:
    return map_llama_style(config, map_attention(config))


def map_attention(config: ModelConfig) -> list[WeightMapping]:
    """Map the projections of queries, keys, values and output, and the norms of queries and keys if there are some."""
    attention = require_variant(config.attention, GQAAttentionConfig, "model.attention")
    output_bias = attention.bias if attention.output_bias is None else attention.output_bias
    norm = "attn.w{}_norm" if attention.qk_norm == "all_heads" else "attn.{}_norm"
    norms = rename_modules({norm.format(part): f"self_attn.{part}_norm" for part in "qk"})
    return [
        *rename_modules({f"attn.w{part}": f"self_attn.{part}_proj" for part in "qkv"}, bias=attention.bias),
        *rename_linear("attn.wo", "self_attn.o_proj", bias=output_bias),
        *(norms if attention.qk_norm else []),
    ]


def map_llama_style(
    config: ModelConfig, attention: Sequence[WeightMapping], *ffns: Sequence[WeightMapping]
) -> list[WeightMapping]:
    """Map a decoder with Llama's names outside of attention.

    attention: mappings of attention. ffns: mappings of the feed-forward network, of each layer if there are several; by
    default Llama's.
    """
    ffns = ffns or (map_dense_ffn("ffn", "mlp", bias=config.ffn.bias),)
    blocks = [
        [
            *rename_linear("attn_residual.norm", "input_layernorm"),
            *attention,
            *rename_linear("ffn_residual.norm", "post_attention_layernorm"),
            *ffn,
        ]
        for ffn in ffns
    ]
    return map_decoder(config, *blocks)


def map_decoder(config: ModelConfig, *blocks: Sequence[WeightMapping]) -> list[WeightMapping]:
    """Map a decoder. blocks: mappings of its blocks, repeated in turn."""
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        map_name("decoder.embedding.tokens.weight", "model.embed_tokens.weight", copies=copies),
        *map_layers(config.n_layers, "decoder.layers.", "model.layers.", *blocks),
        *rename_linear("decoder.norm", "model.norm"),
        *([] if config.embedding.tied else [map_name("head.weight", "lm_head.weight")]),
    ]


def map_dense_ffn(prefix: str, hf_prefix: str, *, bias: bool = False) -> list[WeightMapping]:
    """Map a gated feed-forward network."""
    names = {f"{prefix}.w_{part}": f"{hf_prefix}.{part}_proj" for part in ("gate", "up", "down")}
    return rename_modules(names, bias=bias)


def register_decoder(
    name: str,
    model_type: str,
    keys: Mapping[str, Key],
    read: Callable[[Json], ModelConfig],
    write: Callable[[ModelConfig], Json],
    map_weights: MapWeights,
    *,
    features: Mapping[str, Any] = MappingProxyType({}),
    base: str = "",
    **options: Any,
) -> None:
    """Register a decoder whose tensors have Llama's prefix, and its bare model.

    name: of the classes, without ForCausalLM and Model. features: values of our config, by which its models are known
    among decoders. base: name of the bare class, if it is another one. options: further fields of `Architecture`.
    """
    prefix, length = "model.", "max_position_embeddings"
    architecture = Architecture(
        model_type, keys, read, write, map_weights, base_model_prefix=prefix, max_length_key=length,
        fingerprint={**LLAMA_FINGERPRINT, **features}, **options,
    )  # fmt: skip
    register_architecture(f"{name}ForCausalLM", architecture, base=base or f"{name}Model")


ROTARY_BUFFERS = (r"rotary_emb\.inv_freq$",)
"""Buffers of older files, which are computed."""

register_decoder("Llama", "llama", LLAMA_KEYS, read_llama, write_llama, map_llama, ignored_tensors=ROTARY_BUFFERS)

# Mistral: a Llama with a sliding window (Jiang et al. 2023)

MISTRAL_KEYS = LLAMA_KEYS | {
    **used(
        intermediate_size=14336, num_key_value_heads=(8, int, None), max_position_embeddings=131_072,
        sliding_window=(4096, int, None), attention_dropout=0.0,
    ),
    **supported_values(attention_bias=False, mlp_bias=False),
}  # fmt: skip


def read_mistral(hf_config: Json) -> ModelConfig:
    config = read_llama(hf_config)
    width = hf_config["sliding_window"]
    if width is None:
        return config
    return config.with_changes({"attention.pattern": {"name": "window", "width": width}})


def write_mistral(config: ModelConfig) -> Json:
    pattern = config.attention.pattern
    window = {"sliding_window": pattern.width if isinstance(pattern, WindowPatternConfig) else None}
    return window | omit_keys(write_llama(config), "attention_bias", "mlp_bias")


register_decoder(
    "Mistral", "mistral", MISTRAL_KEYS, read_mistral, write_mistral, map_llama, ignored_tensors=ROTARY_BUFFERS
)

ANY_TOKEN_IDS = {key: COMMON_KEYS[key] for key in ("bos_token_id", "eos_token_id")}
"""Keys of classes that have no default ids."""

# Qwen2 and Qwen2.5: a Llama with biases at queries, keys and values (Qwen Team 2024)

QWEN2_KEYS = omit_keys(LLAMA_KEYS, "attention_bias") | {
    **used(
        vocab_size=151_936, intermediate_size=22_016, num_key_value_heads=(32, int, None),
        max_position_embeddings=32_768, attention_dropout=0.0, layer_types=(None, list, None),
    ),
    **supported_values(mlp_bias=False, use_sliding_window=False),
    **ANY_TOKEN_IDS,
    **ignored("sliding_window", "max_window_layers", kinds=[int, None]),
}  # fmt: skip
QWEN2_BIASES = {"attention.bias": True, "attention.output_bias": False}


def read_qwen2(hf_config: Json) -> ModelConfig:
    _refuse_windows(hf_config)
    return read_llama(hf_config | {"attention_bias": True}).with_changes(QWEN2_BIASES)


def _refuse_windows(hf_config: Json) -> None:
    if LOCAL in read_layer_types(hf_config, global_every=1):
        raise UsageError(f"config.json: layer_types has {LOCAL}, but use_sliding_window is false: remove one of them")


def write_qwen2(config: ModelConfig) -> Json:
    return omit_keys(write_llama(config), "attention_bias", "mlp_bias")


register_decoder("Qwen2", "qwen2", QWEN2_KEYS, read_qwen2, write_qwen2, map_llama, features=QWEN2_BIASES)

# Qwen3: a Llama whose queries and keys are normalised head by head (Qwen Team 2025)

QWEN3_KEYS = QWEN2_KEYS | {**used(head_dim=128), "attention_bias": LLAMA_KEYS["attention_bias"]}


def read_qwen3(hf_config: Json) -> ModelConfig:
    _refuse_windows(hf_config)
    return read_llama(hf_config).with_changes({"attention.qk_norm": True})


def write_qwen3(config: ModelConfig) -> Json:
    return omit_keys(write_llama(config), "mlp_bias")


register_decoder("Qwen3", "qwen3", QWEN3_KEYS, read_qwen3, write_qwen3, map_llama, features={"attention.qk_norm": True})
