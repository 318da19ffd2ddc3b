"""Mistral: MistralForCausalLM, a Llama with a sliding window (Jiang et al. 2023)."""

from megatfm.config import ModelConfig, WindowPatternConfig
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import Json, supported_values, used
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model

KEYS = llama.KEYS | {
    "intermediate_size": used(14336),
    "num_key_value_heads": used(8, int, None),
    "max_position_embeddings": used(131_072),
    "sliding_window": used(4096, int, None),
    "attention_dropout": used(0.0),
    "attention_bias": supported_values(False),
    "mlp_bias": supported_values(False),
}


def read(theirs: Json) -> ModelConfig:
    ours = llama.read(theirs)
    width = theirs["sliding_window"]
    if width is None:
        return ours
    return ours.with_changes({"attention.pattern": {"name": "window", "width": width}})


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
        base_model_prefix="model.",
        ignored_tensors=(r"rotary_emb\.inv_freq$",),
        max_length_key="max_position_embeddings",
        fingerprint=llama.MARKS,
    )
)
register_base_model("MistralModel", ARCHITECTURES.get("MistralForCausalLM"))
