"""Encoders with sparse attention: BigBird (Zaheer et al. 2020), and Longformer (Beltagy et al. 2020), a RoBERTa with
separate projections for global tokens.

Longformer's global tokens are an input in transformers, but part of the model here. config.json keeps them under
megatfm's key; without it, the first token is global, as in transformers' sequence classifiers.
"""

from megatfm.config import BigBirdPatternConfig, LongformerPatternConfig, ModelConfig, require_variant
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.bert import (
    AFTER_ATTENTION,
    ENCODER_KEYS,
    POSITION_IDS,
    ROBERTA_KEYS,
    SELF_ATTENTION,
    SENTENCE_HEAD,
    map_bert,
    map_roberta,
    read_encoder,
    read_roberta,
    register_with_sentence_head,
    write_encoder,
    write_roberta,
)
from megatfm.convert.hf_config import Json, Key, ignored, supported_values, used
from megatfm.convert.weight_mapping import WeightMapping, rename_modules
from megatfm.errors import UsageError

BIG_BIRD_KEYS = ENCODER_KEYS | {
    **used(
        vocab_size=50358, hidden_act="gelu_new", max_position_embeddings=4096, block_size=64, num_random_blocks=3,
        pad_token_id=(0, int, None), bos_token_id=(1, int, list, None), eos_token_id=(2, int, list, None),
    ),
    **supported_values(attention_type="block_sparse", use_bias=True, rescale_embeddings=False),
}  # fmt: skip


def read_big_bird(hf_config: Json) -> ModelConfig:
    if hf_config["num_random_blocks"] < 1:
        raise UsageError(
            f"config.json: num_random_blocks = {hf_config['num_random_blocks']} does not run in transformers: 1 or "
            "more do"
        )
    pattern = {
        "name": "bigbird",
        "block_size": hf_config["block_size"],
        "n_random_blocks": hf_config["num_random_blocks"],
    }
    return read_encoder(hf_config, **{"attention.pattern": pattern})


def write_big_bird(config: ModelConfig) -> Json:
    pattern = require_variant(config.attention.pattern, BigBirdPatternConfig, "model.attention.pattern")
    return write_encoder(
        config, attention_type="block_sparse", block_size=pattern.block_size, num_random_blocks=pattern.n_random_blocks
    )


def big_bird_notes(config: ModelConfig) -> list[str]:
    """Return notes about differences from transformers that no option covers."""
    return [
        "its random blocks are drawn in evaluation as in training; transformers' .eval() reads the first block in "
        "their place, and takes the end of a padded row for the text's: compare with .train() unpadded"
    ]


def map_big_bird(config: ModelConfig) -> list[WeightMapping]:
    return map_bert(config, pooler="bert.pooler")


MASKED_BIG_BIRD = Architecture(
    "big_bird",
    BIG_BIRD_KEYS,
    read_big_bird,
    write_big_bird,
    map_big_bird,
    base_model_prefix="bert.",
    ignored_tensors=(POSITION_IDS, *SENTENCE_HEAD),
    fingerprint={"family": "encoder", "position.name": "learned", "attention.pattern.name": "bigbird"},
    notes=big_bird_notes,
)
register_with_sentence_head("BigBird", MASKED_BIG_BIRD)

GLOBAL_TOKENS_KEY = "megatfm_global_tokens"
LONGFORMER_KEYS = ROBERTA_KEYS | {
    **used(
        vocab_size=30522, pad_token_id=1, bos_token_id=(0, int, list, None), eos_token_id=(2, int, list, None),
        attention_window=(512, int, list),
    ),
    GLOBAL_TOKENS_KEY: Key([0], (list,)),
    **ignored("attention_mode", "ignore_attention_mask", "onnx_export"),
}  # fmt: skip


def read_longformer(hf_config: Json) -> ModelConfig:
    window = hf_config["attention_window"]
    widths = set(window) if isinstance(window, list) else {window}
    if isinstance(window, list) and len(window) != hf_config["num_hidden_layers"]:
        raise UsageError(
            f"config.json: attention_window = {window!r:.80} has {len(window)} widths, but num_hidden_layers = "
            f"{hf_config['num_hidden_layers']}: give one number, or one for each layer"
        )
    if len(widths) > 1:
        raise UsageError(f"config.json: attention_window = {window} differs by layer: megatfm reads one for all layers")
    pattern = {"name": "longformer", "width": widths.pop(), "global_tokens": hf_config[GLOBAL_TOKENS_KEY]}
    config = read_roberta(hf_config)
    return config.with_changes({"attention.name": "longformer", "attention.pattern": pattern})


def write_longformer(config: ModelConfig) -> Json:
    pattern = require_variant(config.attention.pattern, LongformerPatternConfig, "model.attention.pattern")
    if pattern.width % 2:
        raise UsageError(
            f"model.attention.pattern.width = {pattern.width}: transformers' windows are even: an odd one is "
            f"{pattern.width - 1}"
        )
    return write_roberta(config) | {"attention_window": pattern.width, GLOBAL_TOKENS_KEY: list(pattern.global_tokens)}


def map_longformer(config: ModelConfig) -> list[WeightMapping]:
    names = {"wq": "query", "wk": "key", "wv": "value"}
    global_projections = rename_modules(
        {f"attn.{name}_global": f"attention.self.{hf_name}_global" for name, hf_name in names.items()}, bias=True
    )
    return map_roberta(config, "longformer.", [*SELF_ATTENTION, *global_projections, *AFTER_ATTENTION])


register_architecture(
    "LongformerForMaskedLM",
    Architecture(
        "longformer",
        LONGFORMER_KEYS,
        read_longformer,
        write_longformer,
        map_longformer,
        base_model_prefix="longformer.",
        ignored_tensors=(POSITION_IDS, r"^longformer\.pooler\."),
        fingerprint={"family": "encoder", "attention.name": "longformer"},
    ),
    base="LongformerModel",
)
