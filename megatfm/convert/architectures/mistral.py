"""Mistral: MistralForCausalLM, a Llama with a sliding window (Jiang et al. 2023)."""

from megatfm.config import ModelConfig, WindowPatternConfig
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import Json, only, taken
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare

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
    ours = llama.read(theirs)
    width = theirs["sliding_window"]
    if width is None:
        return ours
    return ours.changed({"attention.pattern": {"name": "window", "width": width}})


def write(ours: ModelConfig) -> Json:
    theirs = llama.write(ours)
    pattern = ours.attention.pattern
    window = {"sliding_window": pattern.width if isinstance(pattern, WindowPatternConfig) else None}
    return window | {key: value for key, value in theirs.items() if key not in ("attention_bias", "mlp_bias")}


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
        marks=llama.MARKS,
    )
)
register_bare("MistralModel", ARCHITECTURES.get("MistralForCausalLM"))
