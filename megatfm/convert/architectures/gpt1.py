"""GPT-1: OpenAIGPTLMHeadModel. Its matrices are [d_in, d_out], and queries, keys and values are one."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures.gpt2 import block_rules
from megatfm.convert.config_keys import Json, alias, idle, taken
from megatfm.convert.encoder import SUMMARY
from megatfm.convert.keys import std
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, layers, same
from megatfm.errors import UsageError

ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "swish", "swish": "swish"}
"""Their "gelu" is the tanh form here."""
KEYS = SUMMARY | {
    "vocab_size": taken(40478),
    "n_positions": taken(512),
    "n_embd": taken(768),
    "n_layer": taken(12),
    "n_head": taken(12),
    "layer_norm_epsilon": taken(1e-5),
    "resid_pdrop": taken(0.1),
    "attn_pdrop": taken(0.1),
    "initializer_range": taken(0.02),
    "tie_word_embeddings": taken(True),
    "hidden_size": alias("n_embd"),
    "max_position_embeddings": alias("n_positions"),
    "num_attention_heads": alias("n_head"),
    "num_hidden_layers": alias("n_layer"),
    "afn": taken("gelu"),
    **idle("embd_pdrop", "n_ctx", "n_special", "predict_special_tokens"),
}


def read(theirs: Json) -> ModelConfig:
    width, afn = theirs["n_embd"], theirs["afn"]
    if afn not in ACTIVATIONS:
        raise UsageError(f"config.json: afn = {afn!r} is not one of {', '.join(ACTIVATIONS)}")
    return ModelConfig.of(
        {
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": theirs["n_layer"],
            "attention.n_heads": theirs["n_head"],
            "ffn.d_ff": 4 * width,
            "norm.name": "layer_norm",
            "norm.eps": theirs["layer_norm_epsilon"],
            "norm.placement": "post",
            "ffn.activation": ACTIVATIONS[afn],
            "attention.bias": True,
            "ffn.bias": True,
            "position.name": "learned",
            "position.max_positions": theirs["n_positions"],
            "embedding.tied": theirs["tie_word_embeddings"],
            "dropout": theirs["resid_pdrop"],
            "attention.dropout": theirs["attn_pdrop"],
            "init.name": "normal",
            "init.std": theirs["initializer_range"],
        }
    )


def write(ours: ModelConfig) -> Json:
    afn = next((theirs for theirs, name in ACTIVATIONS.items() if name == ours.ffn.activation), None)
    if afn is None:
        raise UsageError(
            f"model.ffn.activation = {ours.ffn.activation!r} is not one that transformers has here"
        )
    return {
        "vocab_size": ours.vocab_size,
        "n_positions": ours.position.limit,
        "n_embd": ours.d_model,
        "n_layer": ours.n_layers,
        "n_head": ours.attention.n_heads,
        "afn": afn,
        "layer_norm_epsilon": ours.norm.eps,
        "tie_word_embeddings": ours.embedding.tied,
        "resid_pdrop": ours.dropout,
        "embd_pdrop": ours.dropout,
        "attn_pdrop": ours.attention.dropout,
        "initializer_range": std(ours),
    }


def rules(config: ModelConfig) -> list[Rule]:
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        same("decoder.embedding.tokens.weight", "transformer.tokens_embed.weight", copies=copies),
        same("decoder.embedding.positions.weight", "transformer.positions_embed.weight"),
        *layers(config.n_layers, "decoder.layers.", "transformer.h.", block_rules(config)),
        *([] if config.embedding.tied else [same("head.weight", "lm_head.weight")]),
    ]


ARCHITECTURES.register("OpenAIGPTLMHeadModel")(
    Architecture(
        "openai-gpt",
        KEYS,
        read,
        write,
        rules,
        prefix="transformer.",
        ignored=(r"\.attn\.bias$", r"position_ids$"),
        marks={"family": "decoder", "position.name": "learned", "norm.placement": "post"},
    )
)
register_bare("OpenAIGPTModel", ARCHITECTURES.get("OpenAIGPTLMHeadModel"))
