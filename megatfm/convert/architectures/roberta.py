"""RoBERTa: RobertaForMaskedLM. Its positions begin one after the padding token's id."""

from megatfm.config import LearnedPositionConfig, ModelConfig, expect
from megatfm.convert.encoder import BLOCK, POSITION_IDS, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import Json, only
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers
from megatfm.errors import UsageError


def read(theirs: Json) -> ModelConfig:
    only(theirs, hidden_act="gelu")  # that of the head is always this one
    offset = theirs.get("pad_token_id", 1) + 1
    return read_encoder(
        theirs,
        **{
            "position.max_positions": theirs.get("max_position_embeddings", 514) - offset,
            "position.offset": offset,
            "init.name": "normal",
        },
    )


def write(ours: ModelConfig) -> Json:
    position = expect(ours.position, LearnedPositionConfig, "model.position")
    if position.offset < 1:
        raise UsageError("RoBERTa's positions begin after the padding token's id: model.position.offset is 0")
    return write_encoder(
        ours,
        max_position_embeddings=position.max_positions + position.offset,
        pad_token_id=position.offset - 1,
    )


def rules(config: ModelConfig) -> list[Rule]:
    return [
        *embedding("roberta.embeddings.", copies=["lm_head.decoder.weight"]),
        *layers(config.n_layers, "encoder.layers.", "roberta.encoder.layer.", BLOCK),
        *head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", copies=["lm_head.decoder.bias"]),
    ]


ARCHITECTURES.register("RobertaForMaskedLM")(
    Architecture(
        "roberta", read, write, rules, prefix="roberta.", ignored=(POSITION_IDS, r"^roberta\.pooler\.")
    )
)
