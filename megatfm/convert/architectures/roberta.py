"""RoBERTa: RobertaForMaskedLM. Its positions begin one after the padding token's id."""

from megatfm.config import LearnedPositionConfig, ModelConfig, require_variant
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, supported_values, used
from megatfm.convert.encoder import BLOCK, POSITION_IDS, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer
from megatfm.errors import UsageError

KEYS = encoder.KEYS | {
    "vocab_size": used(50265),
    "hidden_act": supported_values("gelu"),  # that of the head is always this one
    "pad_token_id": used(1),
    "bos_token_id": used(0, int, list, None),
    "eos_token_id": used(2, int, list, None),
}


def read(theirs: Json) -> ModelConfig:
    if theirs["pad_token_id"] < 0:
        raise UsageError(
            f"config.json: pad_token_id = {theirs['pad_token_id']}: RoBERTa's positions begin after it"
        )
    offset = theirs["pad_token_id"] + 1
    return read_encoder(
        theirs,
        **{
            "position.max_positions": theirs["max_position_embeddings"] - offset,
            "position.offset": offset,
            "init.name": "normal",
        },
    )


def write(ours: ModelConfig) -> Json:
    position = require_variant(ours.position, LearnedPositionConfig, "model.position")
    if position.offset < 1:
        raise UsageError("RoBERTa's positions begin after the padding token's id: model.position.offset is 0")
    return write_encoder(
        ours,
        max_position_embeddings=position.max_positions + position.offset,
        pad_token_id=position.offset - 1,
    )


def rules(config: ModelConfig) -> list[WeightMapping]:
    return [
        *embedding("roberta.embeddings.", copies=["lm_head.decoder.weight"]),
        *per_layer(config.n_layers, "encoder.layers.", "roberta.encoder.layer.", BLOCK),
        *head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", copies=["lm_head.decoder.bias"]),
    ]


ARCHITECTURES.register("RobertaForMaskedLM")(
    Architecture(
        "roberta",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="roberta.",
        ignored_tensors=(POSITION_IDS, r"^roberta\.pooler\."),
        fingerprint={"family": "encoder", "position.name": "learned", "position.offset": 2},
    )
)
register_base_model("RobertaModel", ARCHITECTURES.get("RobertaForMaskedLM"))
