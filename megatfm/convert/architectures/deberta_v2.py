"""DeBERTa v2 without its convolution, and v3: DebertaV2ForMaskedLM."""

from megatfm.config import DebertaV2PositionConfig, ModelConfig, require_variant
from megatfm.convert import encoder
from megatfm.convert.architectures.deberta import MASK_DECODER, OWN_HEAD, check_kinds
from megatfm.convert.config_keys import Json, ignored, supported_values, used
from megatfm.convert.encoder import AFTER_ATTENTION, POSITION_IDS, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import check_implied_values
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename, rename_linear
from megatfm.errors import UsageError

KEYS = encoder.KEYS | {
    "vocab_size": used(128100),
    "hidden_size": used(1536),
    "num_hidden_layers": used(24),
    "num_attention_heads": used(24),
    "intermediate_size": used(6144),
    "type_vocab_size": used(0),
    "layer_norm_eps": used(1e-7),
    "relative_attention": supported_values(True, default=False),
    "position_biased_input": supported_values(False, default=True),
    "pos_att_type": used(None, str, list, None),
    "max_relative_positions": used(-1),
    "embedding_size": used(None, int),
    "pad_token_id": used(0, int, None),
    "share_att_key": supported_values(True, default=False),
    "norm_rel_ebd": supported_values("layer_norm", default="none"),
    "position_buckets": used(-1),
    "attention_head_size": used(None, int),
    "conv_kernel_size": supported_values(0),
    **ignored("conv_act", "conv_groups"),
    **ignored("legacy", kinds=[bool]),
    **ignored("pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "cls_dropout", "padding_idx"),
}


def read(theirs: Json) -> ModelConfig:
    check_implied_values(theirs, embedding_size=theirs["hidden_size"])
    check_implied_values(theirs, attention_head_size=theirs["hidden_size"] // theirs["num_attention_heads"])
    check_kinds(theirs["pos_att_type"])
    if theirs["position_buckets"] < 1:
        raise UsageError(
            "config.json: position_buckets = -1 is not supported, only relative positions in buckets"
        )
    farthest = theirs["max_relative_positions"]
    return read_encoder(
        theirs,
        **{
            "attention.name": "deberta_v2",
            "attention.bias": None,
            "position.name": "deberta_v2",
            "position.max_positions": None,
            "position.buckets": theirs["position_buckets"],
            "position.max_distance": farthest if farthest > 0 else theirs["max_position_embeddings"],
            "init.name": "normal",
        },
    )


def write(ours: ModelConfig) -> Json:
    position = require_variant(ours.position, DebertaV2PositionConfig, "model.position")
    return write_encoder(
        ours,
        max_position_embeddings=position.max_distance,
        max_relative_positions=-1,
        position_buckets=position.buckets,
        type_vocab_size=ours.embedding.n_segments,
        relative_attention=True,
        position_biased_input=False,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        pos_att_type=["p2c", "c2p"],
    )


def rules(config: ModelConfig) -> list[WeightMapping]:
    block = [
        *rename_linear("attn.wq", "attention.self.query_proj", bias=True),
        *rename_linear("attn.wk", "attention.self.key_proj", bias=True),
        *rename_linear("attn.wv", "attention.self.value_proj", bias=True),
        *AFTER_ATTENTION,
    ]
    segments = rename("encoder.embedding.segments.weight", "deberta.embeddings.token_type_embeddings.weight")
    copies = ["cls.predictions.decoder.weight"]
    return [
        rename("encoder.embedding.tokens.weight", "deberta.embeddings.word_embeddings.weight", copies=copies),
        *([segments] if config.embedding.n_segments else []),
        *rename_linear("encoder.embedding.norm", "deberta.embeddings.LayerNorm", bias=True),
        rename("encoder.position.table.weight", "deberta.encoder.rel_embeddings.weight"),
        *rename_linear("encoder.position.norm", "deberta.encoder.LayerNorm", bias=True),
        *per_layer(config.n_layers, "encoder.layers.", "deberta.encoder.layer.", block),
        *head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            copies=["cls.predictions.decoder.bias"],
        ),
    ]


ARCHITECTURES.register("DebertaV2ForMaskedLM")(
    Architecture(
        "deberta-v2",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="deberta.",
        ignored_tensors=(POSITION_IDS, MASK_DECODER),
        legacy_names=OWN_HEAD,
        fingerprint={"family": "encoder", "attention.name": "deberta_v2"},
    )
)
register_base_model("DebertaV2Model", ARCHITECTURES.get("DebertaV2ForMaskedLM"))
