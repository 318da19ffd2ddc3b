"""GPT-1: OpenAIGPTLMHeadModel. Its matrices are [d_in, d_out], and queries, keys and values are one."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures.gpt2 import block_rules
from megatfm.convert.config_keys import Json, alias, ignored, used
from megatfm.convert.encoder import SUMMARY
from megatfm.convert.keys import std
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename
from megatfm.errors import UsageError

ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "swish", "swish": "swish"}
"""Their "gelu" is the tanh form here."""
KEYS = SUMMARY | {
    "vocab_size": used(40478),
    "n_positions": used(512),
    "n_embd": used(768),
    "n_layer": used(12),
    "n_head": used(12),
    "layer_norm_epsilon": used(1e-5),
    "resid_pdrop": used(0.1),
    "attn_pdrop": used(0.1),
    "initializer_range": used(0.02),
    "tie_word_embeddings": used(True),
    "hidden_size": alias("n_embd"),
    "max_position_embeddings": alias("n_positions"),
    "num_attention_heads": alias("n_head"),
    "num_hidden_layers": alias("n_layer"),
    "afn": used("gelu"),
    **ignored("embd_pdrop", "n_ctx", "n_special", "predict_special_tokens"),
}


def read(theirs: Json) -> ModelConfig:
    width, afn = theirs["n_embd"], theirs["afn"]
    if afn not in ACTIVATIONS:
        raise UsageError(f"config.json: afn = {afn!r} is not one of {', '.join(ACTIVATIONS)}")
    return ModelConfig.from_dotted(
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


def rules(config: ModelConfig) -> list[WeightMapping]:
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        rename("decoder.embedding.tokens.weight", "transformer.tokens_embed.weight", copies=copies),
        rename("decoder.embedding.positions.weight", "transformer.positions_embed.weight"),
        *per_layer(config.n_layers, "decoder.layers.", "transformer.h.", block_rules(config)),
        *([] if config.embedding.tied else [rename("head.weight", "lm_head.weight")]),
    ]


ARCHITECTURES.register("OpenAIGPTLMHeadModel")(
    Architecture(
        "openai-gpt",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="transformer.",
        ignored_tensors=(r"\.attn\.bias$", r"position_ids$"),
        fingerprint={"family": "decoder", "position.name": "learned", "norm.placement": "post"},
    )
)
register_base_model("OpenAIGPTModel", ARCHITECTURES.get("OpenAIGPTLMHeadModel"))
