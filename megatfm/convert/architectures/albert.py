"""ALBERT: AlbertForPreTraining with the sentence head, AlbertForMaskedLM without. Groups of layers share weights."""

from megatfm.config import ModelConfig
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, ignored, supported_values, used
from megatfm.convert.encoder import POSITION_IDS, embedding, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, rename_linear, with_prefix
from megatfm.errors import UsageError

BLOCK = [
    *rename_linear("attn.wq", "attention.query", bias=True),
    *rename_linear("attn.wk", "attention.key", bias=True),
    *rename_linear("attn.wv", "attention.value", bias=True),
    *rename_linear("attn.wo", "attention.dense", bias=True),
    *rename_linear("attn_residual.norm", "attention.LayerNorm", bias=True),
    *rename_linear("ffn.w_up", "ffn", bias=True),
    *rename_linear("ffn.w_down", "ffn_output", bias=True),
    *rename_linear("ffn_residual.norm", "full_layer_layer_norm", bias=True),
]


KEYS = encoder.KEYS | {
    "vocab_size": used(30000),
    "embedding_size": used(128),
    "hidden_size": used(4096),
    "num_attention_heads": used(64),
    "intermediate_size": used(16384),
    "hidden_act": used("gelu_new"),
    "hidden_dropout_prob": used(0.0),
    "attention_probs_dropout_prob": used(0.0),
    "num_hidden_groups": used(1),
    "inner_group_num": supported_values(1),
    "pad_token_id": used(0, int, None),
    "bos_token_id": used(2, int, list, None),
    "eos_token_id": used(3, int, list, None),
    **ignored("classifier_dropout_prob"),
    **ignored("net_structure_type", "num_memory_blocks", "gap_size", "down_scale_factor"),
}

MARKS = {"family": "encoder", "position.name": "learned", "distinct_layers": 1}


def read(theirs: Json) -> ModelConfig:
    if theirs["embedding_size"] == theirs["hidden_size"]:
        raise UsageError(
            "config.json: embedding_size = hidden_size: ALBERT projects even then, and megatfm does not"
        )
    return read_encoder(
        theirs,
        **{
            "embedding.dim": theirs["embedding_size"],
            "distinct_layers": theirs["num_hidden_groups"],
        },
    )


def read_pretraining(theirs: Json) -> ModelConfig:
    return read(theirs).with_changes({"extra_heads.sentence.name": "sentence"})


def write(ours: ModelConfig) -> Json:
    if ours.distinct_layers is None:
        raise UsageError("without model.distinct_layers this is an ELECTRA generator's architecture")
    return write_encoder(
        ours,
        embedding_size=ours.embedding_width,
        num_hidden_groups=ours.distinct_layers,
        inner_group_num=1,
    )


def rules(config: ModelConfig) -> list[WeightMapping]:
    sentence = [
        *rename_linear("sentence.pooler", "albert.pooler", bias=True),
        *rename_linear("sentence.classifier", "sop_classifier.classifier", bias=True),
    ]
    groups = (
        with_prefix(f"encoder.layers.{i}.", f"albert.encoder.albert_layer_groups.{i}.albert_layers.0.", BLOCK)
        for i in range(config.distinct_layers or config.n_layers)
    )
    return [
        *embedding("albert.embeddings.", copies=["predictions.decoder.weight"]),
        *rename_linear(
            "encoder.embedding.projection", "albert.encoder.embedding_hidden_mapping_in", bias=True
        ),
        *(rule for group in groups for rule in group),
        *head(
            "predictions.dense",
            "predictions.LayerNorm",
            "predictions.bias",
            copies=["predictions.decoder.bias"],
        ),
        *(sentence if "sentence" in config.extra_heads else []),
    ]


ARCHITECTURES.register("AlbertForPreTraining")(
    Architecture(
        "albert",
        KEYS,
        read_pretraining,
        write,
        rules,
        base_model_prefix="albert.",
        ignored_tensors=(POSITION_IDS,),
        fingerprint=MARKS,
    )
)
ARCHITECTURES.register("AlbertForMaskedLM")(
    Architecture(
        "albert",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="albert.",
        ignored_tensors=(POSITION_IDS, r"^albert\.pooler\.", r"^sop_classifier\."),
        fingerprint=MARKS,
    )
)
register_base_model("AlbertModel", ARCHITECTURES.get("AlbertForMaskedLM"))
