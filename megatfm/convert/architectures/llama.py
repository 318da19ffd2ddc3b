"""Llama 1 to 3: LlamaForCausalLM. Rotary channels are halves there as here."""

from collections.abc import Sequence

from megatfm.config import HeadsAttentionConfig, ModelConfig, expect
from megatfm.convert.config_keys import Json, Key, idle, only, taken
from megatfm.convert.keys import ROPE, activation, rope, std, their_activation, their_rope
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, linear, same, under
from megatfm.errors import UsageError

KEYS: dict[str, Key] = ROPE | {
    "vocab_size": taken(32000),
    "hidden_size": taken(4096),
    "intermediate_size": taken(11008),
    "num_hidden_layers": taken(32),
    "num_attention_heads": taken(32),
    "num_key_value_heads": taken(None, int, None),
    "head_dim": taken(None, int, None),
    "max_position_embeddings": taken(2048),
    "rms_norm_eps": taken(1e-6),
    "hidden_act": taken("silu"),
    "attention_bias": taken(False),
    "mlp_bias": taken(False),
    "attention_dropout": taken(0.0, float, None),
    "initializer_range": taken(0.02),
    "tie_word_embeddings": taken(False),
    "sliding_window": only(None),
    "bos_token_id": taken(1, int, list, None),
    "eos_token_id": taken(2, int, list, None),
    **idle("max_sequence_length"),
}
MARKS = {"family": "decoder", "position.name": "rope", "attention.name": "heads", "ffn.name": "dense"}


def read(theirs: Json) -> ModelConfig:
    width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
    if heads < 1 or width % heads:
        raise UsageError(
            f"config.json: num_attention_heads = {heads} does not divide hidden_size = {width}, as transformers asks "
            "whatever head_dim is"
        )
    return ModelConfig.of(
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


def rules(config: ModelConfig) -> list[Rule]:
    bias = expect(config.attention, HeadsAttentionConfig, "model.attention").bias
    attention = [
        rule for part in "qkvo" for rule in linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)
    ]
    return rules_around(config, attention)


def rules_around(config: ModelConfig, attention: Sequence[Rule], *ffns: Sequence[Rule]) -> list[Rule]:
    """Of all that is not attention: Mistral's and DeepSeek's are named alike.

    ffns: the feed-forward network, where it is another; of each layer, where there are several.
    """
    ffns = ffns or (dense_rules("ffn", "mlp", bias=config.ffn.bias),)
    blocks = [
        [
            *linear("attn_residual.norm", "input_layernorm"),
            *attention,
            *linear("ffn_residual.norm", "post_attention_layernorm"),
            *ffn,
        ]
        for ffn in ffns
    ]
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        same("decoder.embedding.tokens.weight", "model.embed_tokens.weight", copies=copies),
        *(
            rule
            for i in range(config.n_layers)
            for rule in under(f"decoder.layers.{i}.", f"model.layers.{i}.", blocks[i % len(blocks)])
        ),
        *linear("decoder.norm", "model.norm"),
        *([] if config.embedding.tied else [same("head.weight", "lm_head.weight")]),
    ]


def dense_rules(ours: str, theirs: str, *, bias: bool = False) -> list[Rule]:
    """Of a gated feed-forward network."""
    parts = ("gate", "up", "down")
    return [rule for part in parts for rule in linear(f"{ours}.w_{part}", f"{theirs}.{part}_proj", bias=bias)]


ARCHITECTURES.register("LlamaForCausalLM")(
    Architecture(
        "llama",
        KEYS,
        read,
        write,
        rules,
        prefix="model.",
        ignored=(r"rotary_emb\.inv_freq$",),
        length_key="max_position_embeddings",
        marks=MARKS,
    )
)
register_bare("LlamaModel", ARCHITECTURES.get("LlamaForCausalLM"))
