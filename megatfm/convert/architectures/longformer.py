"""Longformer (Beltagy et al. 2020): LongformerForMaskedLM, RoBERTa with projections of its own for global tokens.

Which tokens see all is an input there and a part of the model here: it is kept in config.json under a key of ours, and
is the first token, as in their classifiers, where that is missing.
"""

from megatfm.config import LongformerPatternConfig, ModelConfig, require_variant
from megatfm.convert.architectures import roberta
from megatfm.convert.config_keys import Json, ignored, used
from megatfm.convert.encoder import AFTER_ATTENTION, POSITION_IDS, SELF_ATTENTION, embedding, head
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename_linear
from megatfm.errors import UsageError

TOKENS = "megatfm_global_tokens"
"""The key of config.json."""
KEYS = roberta.KEYS | {
    "vocab_size": used(30522),
    "pad_token_id": used(1),
    "bos_token_id": used(0, int, list, None),
    "eos_token_id": used(2, int, list, None),
    "attention_window": used(512, int, list),
    TOKENS: used([0], list),
    **ignored("attention_mode", "ignore_attention_mask", "onnx_export"),
}


def read(theirs: Json) -> ModelConfig:
    given = theirs["attention_window"]
    widths = set(given) if isinstance(given, list) else {given}
    if isinstance(given, list) and len(given) != theirs["num_hidden_layers"]:
        raise UsageError(
            f"config.json: attention_window = {given!r:.80} has {len(given)} widths, but num_hidden_layers = "
            f"{theirs['num_hidden_layers']}: give one number, or one for each layer"
        )
    if len(widths) > 1:
        raise UsageError(
            f"config.json: attention_window = {given} differs by layer: megatfm reads one for all layers"
        )
    pattern = {"name": "longformer", "width": widths.pop(), "global_tokens": theirs[TOKENS]}
    ours = roberta.read(theirs)
    return ours.with_changes({"attention.name": "longformer", "attention.pattern": pattern})


def write(ours: ModelConfig) -> Json:
    pattern = require_variant(ours.attention.pattern, LongformerPatternConfig, "model.attention.pattern")
    if pattern.width % 2:
        raise UsageError(
            f"model.attention.pattern.width = {pattern.width}: transformers' windows are even: an odd one is "
            f"{pattern.width - 1}"
        )
    return roberta.write(ours) | {"attention_window": pattern.width, TOKENS: list(pattern.global_tokens)}


def rules(config: ModelConfig) -> list[WeightMapping]:
    wide = [
        rule
        for ours, theirs in (("wq", "query"), ("wk", "key"), ("wv", "value"))
        for rule in rename_linear(f"attn.{ours}_global", f"attention.self.{theirs}_global", bias=True)
    ]
    block = [*SELF_ATTENTION, *wide, *AFTER_ATTENTION]
    return [
        *embedding("longformer.embeddings.", copies=["lm_head.decoder.weight"]),
        *per_layer(config.n_layers, "encoder.layers.", "longformer.encoder.layer.", block),
        *head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", copies=["lm_head.decoder.bias"]),
    ]


ARCHITECTURES.register("LongformerForMaskedLM")(
    Architecture(
        "longformer",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="longformer.",
        ignored_tensors=(POSITION_IDS, r"^longformer\.pooler\."),
        fingerprint={"family": "encoder", "attention.name": "longformer"},
    )
)
register_base_model("LongformerModel", ARCHITECTURES.get("LongformerForMaskedLM"))
