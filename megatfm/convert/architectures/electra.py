"""ELECTRA: ElectraForPreTraining is the discriminator, ElectraForMaskedLM the generator."""

from megatfm.config import ModelConfig
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, supported_values, used
from megatfm.convert.encoder import BLOCK, OLD_NORMS, POSITION_IDS, SUMMARY, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename_linear

KEYS = (
    encoder.KEYS
    | SUMMARY
    | {
        "embedding_size": used(128),
        "hidden_size": used(256),
        "num_attention_heads": used(4),
        "intermediate_size": used(1024),
        "pad_token_id": used(0, int, None),
    }
)
GENERATOR_KEYS = KEYS | {"hidden_act": supported_values("gelu")}
"""The activation of its head is always this one."""


def read(theirs: Json) -> ModelConfig:
    return read_encoder(theirs, **{"embedding.dim": theirs["embedding_size"]})


def read_discriminator(theirs: Json) -> ModelConfig:
    return read_encoder(theirs, **{"family": "discriminator", "embedding.dim": theirs["embedding_size"]})


def write(ours: ModelConfig) -> Json:
    return write_encoder(ours, embedding_size=ours.embedding_width)


def rules(config: ModelConfig) -> list[WeightMapping]:
    return [
        *_encoder(config, copies=["generator_lm_head.weight"]),
        *head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
    ]


def discriminator_rules(config: ModelConfig) -> list[WeightMapping]:
    return [
        *_encoder(config),
        *rename_linear("dense", "discriminator_predictions.dense", bias=True),
        *rename_linear("verdict", "discriminator_predictions.dense_prediction", bias=True),
    ]


def _encoder(config: ModelConfig, copies: tuple[str, ...] | list[str] = ()) -> list[WeightMapping]:
    wider = config.embedding_width != config.d_model
    projection = rename_linear("encoder.embedding.projection", "electra.embeddings_project", bias=True)
    return [
        *embedding("electra.embeddings.", copies=copies),
        *(projection if wider else []),
        *per_layer(config.n_layers, "encoder.layers.", "electra.encoder.layer.", BLOCK),
    ]


ARCHITECTURES.register("ElectraForPreTraining")(
    Architecture(
        "electra",
        KEYS,
        read_discriminator,
        write,
        discriminator_rules,
        base_model_prefix="electra.",
        ignored_tensors=(POSITION_IDS,),
        legacy_names=OLD_NORMS,
        fingerprint={"family": "discriminator"},
    )
)
ARCHITECTURES.register("ElectraForMaskedLM")(
    Architecture(
        "electra",
        GENERATOR_KEYS,
        read,
        write,
        rules,
        base_model_prefix="electra.",
        ignored_tensors=(POSITION_IDS,),
        legacy_names=OLD_NORMS,
        fingerprint={"family": "encoder", "position.name": "learned"},
    )
)
register_base_model("ElectraModel", ARCHITECTURES.get("ElectraForPreTraining"))
