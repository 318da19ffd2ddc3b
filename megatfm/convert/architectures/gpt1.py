"""GPT-1: OpenAIGPTLMHeadModel. Its matrices are [d_in, d_out], and queries, keys and values are one."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures.gpt2 import block_rules
from megatfm.convert.keys import Json, std
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers, same
from megatfm.errors import UsageError

ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "swish", "swish": "swish"}
"""Their "gelu" is the tanh form here."""


def read(theirs: Json) -> ModelConfig:
    width, afn = theirs["n_embd"], theirs.get("afn", "gelu")
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
            "norm.eps": theirs.get("layer_norm_epsilon", 1e-5),
            "norm.placement": "post",
            "ffn.activation": ACTIVATIONS[afn],
            "attention.bias": True,
            "ffn.bias": True,
            "position.name": "learned",
            "position.max_positions": theirs.get("n_positions", 512),
            "embedding.tied": theirs.get("tie_word_embeddings", True),
            "dropout": theirs.get("resid_pdrop", 0.1),
            "attention.dropout": theirs.get("attn_pdrop", 0.1),
            "init.name": "normal",
            "init.std": theirs.get("initializer_range", 0.02),
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
        "openai-gpt", read, write, rules, prefix="transformer.", ignored=(r"\.attn\.bias$", r"position_ids$")
    )
)
