"""Mistral: MistralForCausalLM, a Llama with a window, which must not be shorter than the context."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import Json, only, taken
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.errors import UsageError

KEYS = llama.KEYS | {
    "intermediate_size": taken(14336),
    "num_key_value_heads": taken(8, int, None),
    "max_position_embeddings": taken(131_072),
    "sliding_window": taken(4096, int, None),
    "attention_dropout": taken(0.0),
    "attention_bias": only(False),
    "mlp_bias": only(False),
}


def read(theirs: Json) -> ModelConfig:
    window, context = theirs["sliding_window"], theirs["max_position_embeddings"]
    if window is not None and window < context:
        raise UsageError(
            f"config.json: sliding_window = {window} is shorter than max_position_embeddings = {context}, and megatfm "
            f"has no windows: set sliding_window to null, or max_position_embeddings to {window} or less; sequences of "
            "up to that many tokens give the same"
        )
    return llama.read(theirs)


def write(ours: ModelConfig) -> Json:
    theirs = llama.write(ours)
    return {"sliding_window": None} | {
        key: value for key, value in theirs.items() if key not in ("attention_bias", "mlp_bias")
    }


ARCHITECTURES.register("MistralForCausalLM")(
    Architecture(
        "mistral",
        KEYS,
        read,
        write,
        llama.rules,
        prefix="model.",
        ignored=(r"rotary_emb\.inv_freq$",),
        length_key="max_position_embeddings",
        marks={"family": "decoder", "position.name": "rope", "attention.name": "heads"},
    )
)
register_bare("MistralModel", ARCHITECTURES.get("MistralForCausalLM"))
