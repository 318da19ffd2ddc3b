"""ELECTRA: ElectraForPreTraining (discriminator) and ElectraForMaskedLM (generator)."""

from megatfm.config import ModelConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.bert import (
    BLOCK,
    ENCODER_KEYS,
    OLD_NORMS,
    POSITION_IDS,
    map_embeddings,
    map_head,
    read_encoder,
    write_encoder,
)
from megatfm.convert.hf_config import SUMMARY_KEYS, Json, supported_values, used
from megatfm.convert.weight_mapping import WeightMapping, map_layers, rename_linear

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
