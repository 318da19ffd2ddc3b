"""DeBERTa v2 without its convolution, and v3: DebertaV2ForMaskedLM."""

from megatfm.config import DisentangledBucketsConfig, ModelConfig, expect
from megatfm.convert import encoder
from megatfm.convert.architectures.deberta import MASK_DECODER, OWN_HEAD, check_kinds
from megatfm.convert.config_keys import Json, idle, only, taken
from megatfm.convert.encoder import AFTER_ATTENTION, POSITION_IDS, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import derived
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, layers, linear, same
from megatfm.errors import UsageError

KEYS = encoder.KEYS | {
    "vocab_size": taken(128100),
    "hidden_size": taken(1536),
    "num_hidden_layers": taken(24),
    "num_attention_heads": taken(24),
    "intermediate_size": taken(6144),
    "type_vocab_size": taken(0),
    "layer_norm_eps": taken(1e-7),
    "relative_attention": only(True, default=False),
    "position_biased_input": only(False, default=True),
    "pos_att_type": taken(None, str, list, None),
    "max_relative_positions": taken(-1),
    "embedding_size": taken(None, int),
    "pad_token_id": taken(0, int, None),
    "share_att_key": only(True, default=False),
    "norm_rel_ebd": only("layer_norm", default="none"),
    "position_buckets": taken(-1),
    "attention_head_size": taken(None, int),
    "conv_kernel_size": only(0),
    **idle("conv_act", "conv_groups"),
    **idle("legacy", kinds=[bool]),
    **idle("pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "cls_dropout", "padding_idx"),
}


def read(theirs: Json) -> ModelConfig:
    derived(theirs, embedding_size=theirs["hidden_size"])
    derived(theirs, attention_head_size=theirs["hidden_size"] // theirs["num_attention_heads"])
    check_kinds(theirs["pos_att_type"])
    if theirs["position_buckets"] < 1:
        raise UsageError(
            "config.json: position_buckets = -1 is not supported, only relative positions in buckets"
        )
    farthest = theirs["max_relative_positions"]
    return read_encoder(
        theirs,
        **{
            "attention.name": "disentangled_shared",
            "attention.bias": None,
            "position.name": "disentangled_buckets",
            "position.max_positions": None,
            "position.buckets": theirs["position_buckets"],
            "position.max_distance": farthest if farthest > 0 else theirs["max_position_embeddings"],
            "init.name": "normal",
        },
    )


def write(ours: ModelConfig) -> Json:
    position = expect(ours.position, DisentangledBucketsConfig, "model.position")
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


def rules(config: ModelConfig) -> list[Rule]:
    block = [
        *linear("attn.wq", "attention.self.query_proj", bias=True),
        *linear("attn.wk", "attention.self.key_proj", bias=True),
        *linear("attn.wv", "attention.self.value_proj", bias=True),
        *AFTER_ATTENTION,
    ]
    segments = same("encoder.embedding.segments.weight", "deberta.embeddings.token_type_embeddings.weight")
    copies = ["cls.predictions.decoder.weight"]
    return [
        same("encoder.embedding.tokens.weight", "deberta.embeddings.word_embeddings.weight", copies=copies),
        *([segments] if config.embedding.n_segments else []),
        *linear("encoder.embedding.norm", "deberta.embeddings.LayerNorm", bias=True),
        same("encoder.position.table.weight", "deberta.encoder.rel_embeddings.weight"),
        *linear("encoder.position.norm", "deberta.encoder.LayerNorm", bias=True),
        *layers(config.n_layers, "encoder.layers.", "deberta.encoder.layer.", block),
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
        prefix="deberta.",
        ignored=(POSITION_IDS, MASK_DECODER),
        spellings=OWN_HEAD,
        marks={"family": "encoder", "attention.name": "disentangled_shared"},
    )
)
register_bare("DebertaV2Model", ARCHITECTURES.get("DebertaV2ForMaskedLM"))
