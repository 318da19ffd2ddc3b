"""Llama 1 to 3: LlamaForCausalLM. Rotary channels are halves there as here."""

from collections.abc import Sequence

from megatfm.config import GQAAttentionConfig, ModelConfig, require_variant
from megatfm.convert.config_keys import Json, Key, ignored, supported_values, used
from megatfm.convert.keys import ROPE, activation, rope, std, their_activation, their_rope
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, rename, rename_linear, with_prefix
from megatfm.errors import UsageError

KEYS: dict[str, Key] = ROPE | {
    "vocab_size": used(32000),
    "hidden_size": used(4096),
    "intermediate_size": used(11008),
    "num_hidden_layers": used(32),
    "num_attention_heads": used(32),
    "num_key_value_heads": used(None, int, None),
    "head_dim": used(None, int, None),
    "max_position_embeddings": used(2048),
    "rms_norm_eps": used(1e-6),
    "hidden_act": used("silu"),
    "attention_bias": used(False),
    "mlp_bias": used(False),
    "attention_dropout": used(0.0, float, None),
    "initializer_range": used(0.02),
    "tie_word_embeddings": used(False),
    "sliding_window": supported_values(None),
    "bos_token_id": used(1, int, list, None),
    "eos_token_id": used(2, int, list, None),
    **ignored("max_sequence_length"),
}
MARKS = {"family": "decoder", "position.name": "rope", "attention.name": "gqa", "ffn.name": "dense"}


def read(theirs: Json) -> ModelConfig:
    width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
    if heads < 1 or width % heads:
        raise UsageError(
            f"config.json: num_attention_heads = {heads} does not divide hidden_size = {width}, as transformers asks "
            "whatever head_dim is"
        )
    return ModelConfig.from_dotted(
        {
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": theirs["num_hidden_layers"],
            "attention.n_heads": heads,
            "attention.n_kv_heads": theirs["num_key_value_heads"],
            "attention.head_dim": theirs["head_dim"],
            "ffn.d_ff": theirs["intermediate_size"],
            "norm.eps": theirs["rms_norm_eps"],
            "ffn.activation": activation(theirs["hidden_act"], gated=True),
            "attention.bias": theirs["attention_bias"],
            "ffn.bias": theirs["mlp_bias"],
            "embedding.tied": theirs["tie_word_embeddings"],
            "attention.dropout": theirs["attention_dropout"] or 0.0,
            "init.name": "normal",
            "init.std": theirs["initializer_range"],
            **rope(theirs),
        }
    )


def write(ours: ModelConfig) -> Json:
    return {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.d_model,
        "num_hidden_layers": ours.n_layers,
        "num_attention_heads": ours.attention.n_heads,
        "num_key_value_heads": ours.attention.kv_heads,
        "head_dim": ours.head_width,
        "intermediate_size": ours.ffn.d_ff,
        "rms_norm_eps": ours.norm.eps,
        "hidden_act": their_activation(ours.ffn.activation, gated=True),
        "attention_bias": getattr(ours.attention, "bias", False),
        "mlp_bias": ours.ffn.bias,
        "tie_word_embeddings": ours.embedding.tied,
        "attention_dropout": ours.attention.dropout,
        "initializer_range": std(ours),
        **their_rope(ours),
    }


def rules(config: ModelConfig) -> list[WeightMapping]:
    bias = require_variant(config.attention, GQAAttentionConfig, "model.attention").bias
    attention = [
        rule
        for part in "qkvo"
        for rule in rename_linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)
    ]
    return rules_around(config, attention)


def rules_around(
    config: ModelConfig, attention: Sequence[WeightMapping], *ffns: Sequence[WeightMapping]
) -> list[WeightMapping]:
    """Of all that is not attention: Mistral's and DeepSeek's are named alike.

    ffns: the feed-forward network, where it is another; of each layer, where there are several.
    """
    ffns = ffns or (dense_rules("ffn", "mlp", bias=config.ffn.bias),)
    blocks = [
        [
            *rename_linear("attn_residual.norm", "input_layernorm"),
            *attention,
            *rename_linear("ffn_residual.norm", "post_attention_layernorm"),
            *ffn,
        ]
        for ffn in ffns
    ]
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        rename("decoder.embedding.tokens.weight", "model.embed_tokens.weight", copies=copies),
        *(
            rule
            for i in range(config.n_layers)
            for rule in with_prefix(f"decoder.layers.{i}.", f"model.layers.{i}.", blocks[i % len(blocks)])
        ),
        *rename_linear("decoder.norm", "model.norm"),
        *([] if config.embedding.tied else [rename("head.weight", "lm_head.weight")]),
    ]


def dense_rules(ours: str, theirs: str, *, bias: bool = False) -> list[WeightMapping]:
    """Of a gated feed-forward network."""
    parts = ("gate", "up", "down")
    return [
        rule
        for part in parts
        for rule in rename_linear(f"{ours}.w_{part}", f"{theirs}.{part}_proj", bias=bias)
    ]


ARCHITECTURES.register("LlamaForCausalLM")(
    Architecture(
        "llama",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="model.",
        ignored_tensors=(r"rotary_emb\.inv_freq$",),
        max_length_key="max_position_embeddings",
        fingerprint=MARKS,
    )
)
register_base_model("LlamaModel", ARCHITECTURES.get("LlamaForCausalLM"))
