"""ELECTRA: ElectraForPreTraining is the discriminator, ElectraForMaskedLM the generator."""

from megatfm.config import ModelConfig
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, only, taken
from megatfm.convert.encoder import BLOCK, OLD_NORMS, POSITION_IDS, SUMMARY, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, layers, linear

KEYS = (
    encoder.KEYS
    | SUMMARY
    | {
        "embedding_size": taken(128),
        "hidden_size": taken(256),
        "num_attention_heads": taken(4),
        "intermediate_size": taken(1024),
        "pad_token_id": taken(0, int, None),
    }
)
GENERATOR_KEYS = KEYS | {"hidden_act": only("gelu")}
"""The activation of its head is always this one."""


def read(theirs: Json) -> ModelConfig:
    return read_encoder(theirs, **{"embedding.dim": theirs["embedding_size"]})


def read_discriminator(theirs: Json) -> ModelConfig:
    return read_encoder(theirs, **{"family": "discriminator", "embedding.dim": theirs["embedding_size"]})


def write(ours: ModelConfig) -> Json:
    return write_encoder(ours, embedding_size=ours.embedding_width)


def rules(config: ModelConfig) -> list[Rule]:
    return [
        *_encoder(config, copies=["generator_lm_head.weight"]),
        *head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
    ]


def discriminator_rules(config: ModelConfig) -> list[Rule]:
    return [
        *_encoder(config),
        *linear("dense", "discriminator_predictions.dense", bias=True),
        *linear("verdict", "discriminator_predictions.dense_prediction", bias=True),
    ]


def _encoder(config: ModelConfig, copies: tuple[str, ...] | list[str] = ()) -> list[Rule]:
    wider = config.embedding_width != config.d_model
    projection = linear("encoder.embedding.projection", "electra.embeddings_project", bias=True)
    return [
        *embedding("electra.embeddings.", copies=copies),
        *(projection if wider else []),
        *layers(config.n_layers, "encoder.layers.", "electra.encoder.layer.", BLOCK),
    ]


ARCHITECTURES.register("ElectraForPreTraining")(
    Architecture(
        "electra",
        KEYS,
        read_discriminator,
        write,
        discriminator_rules,
        prefix="electra.",
        ignored=(POSITION_IDS,),
        spellings=OLD_NORMS,
        marks={"family": "discriminator"},
    )
)
ARCHITECTURES.register("ElectraForMaskedLM")(
    Architecture(
        "electra",
        GENERATOR_KEYS,
        read,
        write,
        rules,
        prefix="electra.",
        ignored=(POSITION_IDS,),
        spellings=OLD_NORMS,
        marks={"family": "encoder", "position.name": "learned"},
    )
)
register_bare("ElectraModel", ARCHITECTURES.get("ElectraForPreTraining"))
