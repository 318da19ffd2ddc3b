"""BERT, RoBERTa and ALBERT with their pretraining heads, ELECTRA's generator (ElectraForMaskedLM) and discriminator
(ElectraForPreTraining), and the parts that other encoders share with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatfm.config import LearnedPositionConfig, ModelConfig, require_variant
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.hf_config import SUMMARY_KEYS, Json, Key, ignored, supported_values, used
from megatfm.convert.hf_values import activation_from_hf, activation_to_hf, read_mapped, write_mapped
from megatfm.convert.weight_mapping import (
    WeightMapping,
    add_prefix,
    map_layers,
    map_name,
    rename_linear,
    rename_modules,
)
from megatfm.errors import UsageError

OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""Names of a norm's weight and bias in checkpoints that came from TensorFlow."""
POSITION_IDS = r"embeddings\.position_ids$"
"""Name of a buffer in older files."""

ENCODER_KEYS: dict[str, Key] = {
    **used(
        vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        hidden_act="gelu", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, max_position_embeddings=512,
        type_vocab_size=2, initializer_range=0.02, layer_norm_eps=1e-12,
    ),
    **supported_values(position_embedding_type="absolute", tie_word_embeddings=True),
}  # fmt: skip
"""Keys of BERT's config.json with its defaults; related encoders add to them."""
POOLER = ignored(
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
)  # fmt: skip
"""Keys of Google's about the pooler, which transformers doesn't read."""


ENCODER_MAPPING = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "attention.n_heads",
    "intermediate_size": "ffn.d_ff",
    "layer_norm_eps": "norm.eps",
    "max_position_embeddings": "position.max_positions",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention.dropout",
    "initializer_range": "init.std",
}


def read_encoder(hf_config: Json, **overrides: Any) -> ModelConfig:
    """Read a post-norm encoder with learned positions and BERT's head.

    overrides: megatfm's keys that differ; None removes a key. Raises UsageError for unsupported features.
    """
    common = {
        **read_mapped(hf_config, ENCODER_MAPPING),
        "family": "encoder",
        "norm.name": "layer_norm",
        "norm.placement": "post",
        "embedding.norm": True,
        "ffn.activation": activation_from_hf(hf_config["hidden_act"]),
        "attention.bias": True,
        "ffn.bias": True,
        "position.name": "learned",
        "embedding.n_segments": hf_config["type_vocab_size"],
        "lm_head.name": "transform",
        "lm_head.bias": True,
        "init.name": "bert",
    }
    return ModelConfig.from_dotted({key: value for key, value in (common | overrides).items() if value is not None})


def write_encoder(config: ModelConfig, **overrides: Any) -> Json:
    """Write config.json, the inverse of `read_encoder`. Raises UsageError for an activation that transformers lacks."""
    common = {
        **write_mapped(config, ENCODER_MAPPING),
        "hidden_act": activation_to_hf(config.ffn.activation),
        "type_vocab_size": max(config.embedding.n_segments, 1),
        "tie_word_embeddings": True,
    }
    return common | overrides


def map_embeddings(hf_prefix: str, *, copies: Iterable[str] = ()) -> list[WeightMapping]:
    """Map the embeddings and their norm. hf_prefix: such as "bert.embeddings.". copies: names of the tied output
    matrix."""
    return [
        map_name("encoder.embedding.tokens.weight", f"{hf_prefix}word_embeddings.weight", copies=copies),
        map_name("encoder.embedding.positions.weight", f"{hf_prefix}position_embeddings.weight"),
        map_name("encoder.embedding.segments.weight", f"{hf_prefix}token_type_embeddings.weight"),
        *rename_linear("encoder.embedding.norm", f"{hf_prefix}LayerNorm", bias=True),
    ]


SELF_ATTENTION = rename_modules(
    {"attn.wq": "attention.self.query", "attn.wk": "attention.self.key", "attn.wv": "attention.self.value"}, bias=True
)
AFTER_ATTENTION = rename_modules(
    {
        "attn.wo": "attention.output.dense",
        "attn_residual.norm": "attention.output.LayerNorm",
        "ffn.w_up": "intermediate.dense",
        "ffn.w_down": "output.dense",
        "ffn_residual.norm": "output.LayerNorm",
    },
    bias=True,
)
BLOCK = [*SELF_ATTENTION, *AFTER_ATTENTION]
"""A block of BERT, RoBERTa and ELECTRA."""


def map_head(transform: str, norm: str, bias: str, copies: Iterable[str] = ()) -> list[WeightMapping]:
    """Map dense layer, norm and bias of the output head. copies: other names of the bias."""
    return [
        *rename_linear("head.transform.dense", transform, bias=True),
        *rename_linear("head.transform.norm", norm, bias=True),
        map_name("head.bias", bias, copies=copies),
    ]


PREDICTION_HEAD = map_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.bias",
    copies=["cls.predictions.decoder.bias"],
)
"""The output head of BERT and DeBERTa."""

# BERT: BertForPreTraining has the sentence head, BertForMaskedLM has not

BERT_KEYS = ENCODER_KEYS | POOLER | used(pad_token_id=(0, int, None))


def map_bert(config: ModelConfig, pooler: str = "bert.pooler.dense") -> list[WeightMapping]:
    sentence = [
        *rename_linear("sentence.pooler", pooler, bias=True),
        *rename_linear("sentence.classifier", "cls.seq_relationship", bias=True),
    ]
    return [
        *map_embeddings("bert.embeddings.", copies=["cls.predictions.decoder.weight"]),
        *map_layers(config.n_layers, "encoder.layers.", "bert.encoder.layer.", BLOCK),
        *PREDICTION_HEAD,
        *(sentence if "sentence" in config.extra_heads else []),
    ]


# Google's checkpoints are named BertForMaskedLM, but also hold the sentence head.
SENTENCE_HEAD = (r"^bert\.pooler\.", r"^cls\.seq_relationship\.")
MASKED_BERT = Architecture(
    "bert",
    BERT_KEYS,
    read_encoder,
    write_encoder,
    map_bert,
    base_model_prefix="bert.",
    ignored_tensors=(POSITION_IDS, *SENTENCE_HEAD),
    legacy_names=OLD_NORMS,
    fingerprint={"family": "encoder", "position.name": "learned", "position.offset": 0},
)


def register_with_sentence_head(family: str, masked: Architecture) -> None:
    """Register the classes ForPreTraining, which has the sentence head, ForMaskedLM and Model of a family."""

    def read(hf_config: Json) -> ModelConfig:
        return masked.config_from_hf(hf_config).with_changes({"extra_heads.sentence.classes": 2})

    with_sentence = replace(masked, config_from_hf=read, ignored_tensors=(POSITION_IDS,))
    register_architecture(f"{family}ForPreTraining", with_sentence)
    register_architecture(f"{family}ForMaskedLM", masked, base=f"{family}Model")


register_with_sentence_head("Bert", MASKED_BERT)

# RoBERTa, whose positions begin one after the padding token's id

ROBERTA_KEYS = ENCODER_KEYS | {
    **used(vocab_size=50265, pad_token_id=1, bos_token_id=(0, int, list, None), eos_token_id=(2, int, list, None)),
    **supported_values(hidden_act="gelu"),  # the head's activation is always this one
}


def read_roberta(hf_config: Json) -> ModelConfig:
    if hf_config["pad_token_id"] < 0:
        raise UsageError(f"config.json: pad_token_id = {hf_config['pad_token_id']}: RoBERTa's positions begin after it")
    offset = hf_config["pad_token_id"] + 1
    return read_encoder(
        hf_config,
        **{
            "position.max_positions": hf_config["max_position_embeddings"] - offset,
            "position.offset": offset,
            "init.name": "normal",
        },
    )


def write_roberta(config: ModelConfig) -> Json:
    position = require_variant(config.position, LearnedPositionConfig, "model.position")
    if position.offset < 1:
        raise UsageError("RoBERTa's positions begin after the padding token's id: model.position.offset is 0")
    return write_encoder(
        config, max_position_embeddings=position.max_positions + position.offset, pad_token_id=position.offset - 1
    )


def map_roberta(
    config: ModelConfig, prefix: str = "roberta.", block: Sequence[WeightMapping] = BLOCK
) -> list[WeightMapping]:
    return [
        *map_embeddings(f"{prefix}embeddings.", copies=["lm_head.decoder.weight"]),
        *map_layers(config.n_layers, "encoder.layers.", f"{prefix}encoder.layer.", block),
        *map_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", copies=["lm_head.decoder.bias"]),
    ]


register_architecture(
    "RobertaForMaskedLM",
    Architecture(
        "roberta",
        ROBERTA_KEYS,
        read_roberta,
        write_roberta,
        map_roberta,
        base_model_prefix="roberta.",
        ignored_tensors=(POSITION_IDS, r"^roberta\.pooler\."),
        fingerprint={"family": "encoder", "position.name": "learned", "position.offset": 2},
    ),
    base="RobertaModel",
)

# ALBERT, whose groups of layers share weights

ALBERT_BLOCK = rename_modules(
    {
        "attn.wq": "attention.query",
        "attn.wk": "attention.key",
        "attn.wv": "attention.value",
        "attn.wo": "attention.dense",
        "attn_residual.norm": "attention.LayerNorm",
        "ffn.w_up": "ffn",
        "ffn.w_down": "ffn_output",
        "ffn_residual.norm": "full_layer_layer_norm",
    },
    bias=True,
)


ALBERT_KEYS = ENCODER_KEYS | {
    **used(
        vocab_size=30000, embedding_size=128, hidden_size=4096, num_attention_heads=64, intermediate_size=16384,
        hidden_act="gelu_new", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_groups=1,
        pad_token_id=(0, int, None), bos_token_id=(2, int, list, None), eos_token_id=(3, int, list, None),
    ),
    **supported_values(inner_group_num=1),
    **ignored("classifier_dropout_prob"),
    **ignored("net_structure_type", "num_memory_blocks", "gap_size", "down_scale_factor"),
}  # fmt: skip


def read_albert(hf_config: Json) -> ModelConfig:
    if hf_config["embedding_size"] == hf_config["hidden_size"]:
        raise UsageError("config.json: embedding_size = hidden_size: ALBERT projects even then, and megatfm does not")
    return read_encoder(
        hf_config, **{"embedding.dim": hf_config["embedding_size"], "distinct_layers": hf_config["num_hidden_groups"]}
    )


def write_albert(config: ModelConfig) -> Json:
    if config.distinct_layers is None:
        raise UsageError("without model.distinct_layers this is an ELECTRA generator's architecture")
    return write_encoder(
        config, embedding_size=config.embedding_width, num_hidden_groups=config.distinct_layers, inner_group_num=1
    )


def map_albert(config: ModelConfig) -> list[WeightMapping]:
    sentence = [
        *rename_linear("sentence.pooler", "albert.pooler", bias=True),
        *rename_linear("sentence.classifier", "sop_classifier.classifier", bias=True),
    ]
    block = add_prefix("", "albert_layers.0.", ALBERT_BLOCK)
    n_groups, hf_groups = config.distinct_layers or config.n_layers, "albert.encoder.albert_layer_groups."
    return [
        *map_embeddings("albert.embeddings.", copies=["predictions.decoder.weight"]),
        *rename_linear("encoder.embedding.projection", "albert.encoder.embedding_hidden_mapping_in", bias=True),
        *map_layers(n_groups, "encoder.layers.", hf_groups, block),
        *map_head(
            "predictions.dense", "predictions.LayerNorm", "predictions.bias", copies=["predictions.decoder.bias"]
        ),
        *(sentence if "sentence" in config.extra_heads else []),
    ]


MASKED_ALBERT = Architecture(
    "albert",
    ALBERT_KEYS,
    read_albert,
    write_albert,
    map_albert,
    base_model_prefix="albert.",
    ignored_tensors=(POSITION_IDS, r"^albert\.pooler\.", r"^sop_classifier\."),
    fingerprint={"family": "encoder", "position.name": "learned", "distinct_layers": 1},
)
register_with_sentence_head("Albert", MASKED_ALBERT)

# ELECTRA

ELECTRA_KEYS = {
    **ENCODER_KEYS,
    **SUMMARY_KEYS,
    **used(
        embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024, pad_token_id=(0, int, None)
    ),
}
ELECTRA_GENERATOR_KEYS = ELECTRA_KEYS | supported_values(hidden_act="gelu")
"""The head always has this activation."""


def read_electra_generator(hf_config: Json) -> ModelConfig:
    return read_encoder(hf_config, **{"embedding.dim": hf_config["embedding_size"]})


def read_electra_discriminator(hf_config: Json) -> ModelConfig:
    return read_encoder(hf_config, **{"family": "discriminator", "embedding.dim": hf_config["embedding_size"]})


def write_electra(config: ModelConfig) -> Json:
    return write_encoder(config, embedding_size=config.embedding_width)


def map_electra_generator(config: ModelConfig) -> list[WeightMapping]:
    return [
        *_map_encoder(config, copies=["generator_lm_head.weight"]),
        *map_head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
    ]


def map_electra_discriminator(config: ModelConfig) -> list[WeightMapping]:
    return [
        *_map_encoder(config),
        *rename_linear("dense", "discriminator_predictions.dense", bias=True),
        *rename_linear("verdict", "discriminator_predictions.dense_prediction", bias=True),
    ]


def _map_encoder(config: ModelConfig, copies: tuple[str, ...] | list[str] = ()) -> list[WeightMapping]:
    has_projection = config.embedding_width != config.d_model
    projection = rename_linear("encoder.embedding.projection", "electra.embeddings_project", bias=True)
    return [
        *map_embeddings("electra.embeddings.", copies=copies),
        *(projection if has_projection else []),
        *map_layers(config.n_layers, "encoder.layers.", "electra.encoder.layer.", BLOCK),
    ]


register_architecture(
    "ElectraForPreTraining",
    Architecture(
        "electra",
        ELECTRA_KEYS,
        read_electra_discriminator,
        write_electra,
        map_electra_discriminator,
        base_model_prefix="electra.",
        ignored_tensors=(POSITION_IDS,),
        legacy_names=OLD_NORMS,
        fingerprint={"family": "discriminator"},
    ),
    base="ElectraModel",
)
register_architecture(
    "ElectraForMaskedLM",
    Architecture(
        "electra",
        ELECTRA_GENERATOR_KEYS,
        read_electra_generator,
        write_electra,
        map_electra_generator,
        base_model_prefix="electra.",
        ignored_tensors=(POSITION_IDS,),
        legacy_names=OLD_NORMS,
        fingerprint={"family": "encoder", "position.name": "learned"},
    ),
)
