"""ELECTRA: ElectraForPreTraining is the discriminator, ElectraForMaskedLM the generator."""

from megatfm.config import ModelConfig
from megatfm.convert.encoder import BLOCK, OLD_NORMS, POSITION_IDS, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import Json, only
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers, linear


def read(theirs: Json) -> ModelConfig:
    only(theirs, hidden_act="gelu")  # that of the generator's head is always this one
    return read_encoder(theirs, **{"embedding.dim": theirs.get("embedding_size", 128)})


def read_discriminator(theirs: Json) -> ModelConfig:
    return read_encoder(
        theirs, **{"family": "discriminator", "embedding.dim": theirs.get("embedding_size", 128)}
    )


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
        read_discriminator,
        write,
        discriminator_rules,
        prefix="electra.",
        ignored=(POSITION_IDS,),
        spellings=OLD_NORMS,
    )
)
ARCHITECTURES.register("ElectraForMaskedLM")(
    Architecture(
        "electra", read, write, rules, prefix="electra.", ignored=(POSITION_IDS,), spellings=OLD_NORMS
    )
)
