"""BigBird (Zaheer et al. 2020): BigBirdForPreTraining with the sentence head, BigBirdForMaskedLM without."""

from megatfm.config import BigBirdPatternConfig, ModelConfig, require_variant
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, supported_values, used
from megatfm.convert.encoder import BLOCK, POSITION_IDS, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename_linear
from megatfm.errors import UsageError

KEYS = encoder.KEYS | {
    "vocab_size": used(50358),
    "hidden_act": used("gelu_new"),
    "max_position_embeddings": used(4096),
    "attention_type": supported_values("block_sparse"),
    "block_size": used(64),
    "num_random_blocks": used(3),
    "use_bias": supported_values(True),
    "rescale_embeddings": supported_values(False),
    "pad_token_id": used(0, int, None),
    "bos_token_id": used(1, int, list, None),
    "eos_token_id": used(2, int, list, None),
}
MARKS = {"family": "encoder", "position.name": "learned", "attention.pattern.name": "bigbird"}


def read(theirs: Json, **others: object) -> ModelConfig:
    if theirs["num_random_blocks"] < 1:
        raise UsageError(
            f"config.json: num_random_blocks = {theirs['num_random_blocks']} does not run in transformers: 1 or more do"
        )
    pattern = {
        "name": "bigbird",
        "block_size": theirs["block_size"],
        "n_random_blocks": theirs["num_random_blocks"],
    }
    return read_encoder(theirs, **{"attention.pattern": pattern}, **others)


def read_pretraining(theirs: Json) -> ModelConfig:
    return read(theirs, **{"extra_heads.sentence.classes": 2})


def write(ours: ModelConfig) -> Json:
    pattern = require_variant(ours.attention.pattern, BigBirdPatternConfig, "model.attention.pattern")
    return write_encoder(
        ours,
        attention_type="block_sparse",
        block_size=pattern.block_size,
        num_random_blocks=pattern.n_random_blocks,
    )


def remarks(config: ModelConfig) -> list[str]:
    """How ours differs from theirs, since neither has an option for the other's way."""
    return [
        "its random blocks are drawn in evaluation as in training; transformers' .eval() reads the first block in "
        "their place, and takes the end of a padded row for the text's: compare with .train() unpadded"
    ]


def rules(config: ModelConfig) -> list[WeightMapping]:
    sentence = [
        *rename_linear("sentence.pooler", "bert.pooler", bias=True),
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


ARCHITECTURES.register("BigBirdForPreTraining")(
    Architecture(
        "big_bird",
        KEYS,
        read_pretraining,
        write,
        rules,
        base_model_prefix="bert.",
        ignored_tensors=(POSITION_IDS,),
        fingerprint=MARKS,
        remarks=remarks,
    )
)
ARCHITECTURES.register("BigBirdForMaskedLM")(
    Architecture(
        "big_bird",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="bert.",
        ignored_tensors=(POSITION_IDS, r"^bert\.pooler\.", r"^cls\.seq_relationship\."),
        fingerprint=MARKS,
        remarks=remarks,
    )
)
register_base_model("BigBirdModel", ARCHITECTURES.get("BigBirdForMaskedLM"))
