"""Mistral: MistralForCausalLM, a Llama with a window, which must not be shorter than the context."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures import llama
from megatfm.convert.keys import Json, only
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.errors import UsageError

CONTEXT, WINDOW, KV_HEADS = 131_072, 4096, 8
"""Their defaults, for keys that config.json leaves out."""


def read(theirs: Json) -> ModelConfig:
    window, context = (
        theirs.get("sliding_window", WINDOW),
        theirs.get("max_position_embeddings", CONTEXT),
    )
    if window is not None and window < context:
        raise UsageError(
            f"config.json: sliding_window = {window} is shorter than max_position_embeddings = {context}, and megatfm "
            f"has no windows: set sliding_window to null, or max_position_embeddings to {window} or less; sequences of "
            "up to that many tokens give the same"
        )
    only(theirs, attention_bias=False, mlp_bias=False)
    return llama.read({"num_key_value_heads": KV_HEADS, **theirs})


def write(ours: ModelConfig) -> Json:
    theirs = llama.write(ours)
    return {"sliding_window": None} | {
        key: value for key, value in theirs.items() if key not in ("attention_bias", "mlp_bias")
    }


ARCHITECTURES.register("MistralForCausalLM")(
    Architecture(
        "mistral",
        read,
        write,
        llama.rules,
        prefix="model.",
        ignored=(r"rotary_emb\.inv_freq$",),
        length_key="max_position_embeddings",
    )
)
