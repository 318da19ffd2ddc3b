"""BigBird (Zaheer et al. 2020): BigBirdForPreTraining with the sentence head, BigBirdForMaskedLM without."""

from megatfm.config import BigBirdPatternConfig, ModelConfig, expect
from megatfm.convert.encoder import BLOCK, POSITION_IDS, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import Json, only
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers, linear


def read(theirs: Json, **others: object) -> ModelConfig:
    only(theirs, attention_type="block_sparse", use_bias=True, rescale_embeddings=False)
    pattern = {
        "name": "bigbird",
        "block": theirs.get("block_size", 64),
        "random": theirs.get("num_random_blocks", 3),
    }
    defaults = {"hidden_act": "gelu_new", "max_position_embeddings": 4096}
    return read_encoder({**defaults, **theirs}, **{"attention.pattern": pattern}, **others)


def read_pretraining(theirs: Json) -> ModelConfig:
    return read(theirs, **{"heads.sentence.classes": 2})


def write(ours: ModelConfig) -> Json:
    pattern = expect(ours.attention.pattern, BigBirdPatternConfig, "model.attention.pattern")
    return write_encoder(
        ours, attention_type="block_sparse", block_size=pattern.block, num_random_blocks=pattern.random
    )


def rules(config: ModelConfig) -> list[Rule]:
    sentence = [
        *linear("sentence.pooler", "bert.pooler", bias=True),
        *linear("sentence.classifier", "cls.seq_relationship", bias=True),
    ]
    return [
        *embedding("bert.embeddings.", copies=["cls.predictions.decoder.weight"]),
        *layers(config.n_layers, "encoder.layers.", "bert.encoder.layer.", BLOCK),
        *head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            copies=["cls.predictions.decoder.bias"],
        ),
        *(sentence if "sentence" in config.heads else []),
    ]


ARCHITECTURES.register("BigBirdForPreTraining")(
    Architecture("big_bird", read_pretraining, write, rules, prefix="bert.", ignored=(POSITION_IDS,))
)
ARCHITECTURES.register("BigBirdForMaskedLM")(
    Architecture(
        "big_bird",
        read,
        write,
        rules,
        prefix="bert.",
        ignored=(POSITION_IDS, r"^bert\.pooler\.", r"^cls\.seq_relationship\."),
    )
)
