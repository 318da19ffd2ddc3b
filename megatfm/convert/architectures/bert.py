"""BERT: BertForPreTraining with the sentence head, BertForMaskedLM without."""

from megatfm.config import ModelConfig
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, used
from megatfm.convert.encoder import BLOCK, OLD_NORMS, POOLER, POSITION_IDS, embedding, head, read, write
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename_linear

KEYS = encoder.KEYS | POOLER | {"pad_token_id": used(0, int, None)}

MARKS = {"family": "encoder", "position.name": "learned", "position.offset": 0}


def read_pretraining(theirs: Json) -> ModelConfig:
    return read(theirs, **{"extra_heads.sentence.classes": 2})


def rules(config: ModelConfig) -> list[WeightMapping]:
    sentence = [
        *rename_linear("sentence.pooler", "bert.pooler.dense", bias=True),
        *rename_linear("sentence.classifier", "cls.seq_relationship", bias=True),
    ]
    return [
        *embedding("bert.embeddings.", copies=["cls.predictions.decoder.weight"]),
        *per_layer(config.n_layers, "encoder.layers.", "bert.encoder.layer.", BLOCK),
        *head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            copies=["cls.predictions.decoder.bias"],
        ),
        *(sentence if "sentence" in config.extra_heads else []),
    ]


ARCHITECTURES.register("BertForPreTraining")(
    Architecture(
        "bert",
        KEYS,
        read_pretraining,
        write,
        rules,
        base_model_prefix="bert.",
        ignored_tensors=(POSITION_IDS,),
        legacy_names=OLD_NORMS,
        fingerprint=MARKS,
    )
)
# Google's checkpoints call themselves BertForMaskedLM and hold the other head all the same.
OTHER_HEAD = (r"^bert\.pooler\.", r"^cls\.seq_relationship\.")
ARCHITECTURES.register("BertForMaskedLM")(
    Architecture(
        "bert",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="bert.",
        ignored_tensors=(POSITION_IDS, *OTHER_HEAD),
        legacy_names=OLD_NORMS,
        fingerprint=MARKS,
    )
)
register_base_model("BertModel", ARCHITECTURES.get("BertForMaskedLM"))
