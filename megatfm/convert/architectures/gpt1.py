"""GPT-1: OpenAIGPTLMHeadModel. Its matrices are [d_in, d_out], and queries, keys and values are one."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures.gpt2 import block_rules
from megatfm.convert.keys import Json
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers, same
from megatfm.errors import UsageError

ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "swish", "swish": "swish"}
"""Their "gelu" is the tanh form here."""


def read(theirs: Json) -> ModelConfig:
    width, afn = theirs["n_embd"], theirs.get("afn", "gelu")
    if afn not in ACTIVATIONS:
        raise UsageError(f"config.json: afn = {afn!r} is not one of {', '.join(ACTIVATIONS)}")
    return ModelConfig(
        vocab_size=theirs["vocab_size"],
        d_model=width,
        n_layers=theirs["n_layer"],
        n_heads=theirs["n_head"],
        d_ff=4 * width,
        norm="layer_norm",
        norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        norm_position="post",
        activation=ACTIVATIONS[afn],
        attention_bias=True,
        ffn_bias=True,
        position="learned",
        max_positions=theirs.get("n_positions", 512),
        tie_embeddings=theirs.get("tie_word_embeddings", True),
        dropout=theirs.get("resid_pdrop", 0.1),
        attention_dropout=theirs.get("attn_pdrop", 0.1),
        init="normal",
        init_std=theirs.get("initializer_range", 0.02),
    )


def write(ours: ModelConfig) -> Json:
    afn = next((theirs for theirs, name in ACTIVATIONS.items() if name == ours.activation), None)
    if afn is None:
        raise UsageError(f"model.activation = {ours.activation!r} is not one that transformers has here")
    return {
        "vocab_size": ours.vocab_size,
        "n_positions": ours.max_positions,
        "n_embd": ours.d_model,
        "n_layer": ours.n_layers,
        "n_head": ours.n_heads,
        "afn": afn,
        "layer_norm_epsilon": ours.norm_eps,
        "tie_word_embeddings": ours.tie_embeddings,
        "resid_pdrop": ours.dropout,
        "embd_pdrop": ours.dropout,
        "attn_pdrop": ours.attention_dropout,
        "initializer_range": ours.init_std,
    }


def rules(config: ModelConfig) -> list[Rule]:
    copies = ["lm_head.weight"] if config.tie_embeddings else []
    return [
        same("decoder.embedding.tokens.weight", "transformer.tokens_embed.weight", copies=copies),
        same("decoder.embedding.positions.weight", "transformer.positions_embed.weight"),
        *layers(config.n_layers, "decoder.layers.", "transformer.h.", block_rules(config)),
        *([] if config.tie_embeddings else [same("head.weight", "lm_head.weight")]),
    ]


ARCHITECTURES.register("OpenAIGPTLMHeadModel")(
    Architecture(
        "openai-gpt", read, write, rules, prefix="transformer.", ignored=(r"\.attn\.bias$", r"position_ids$")
    )
)
