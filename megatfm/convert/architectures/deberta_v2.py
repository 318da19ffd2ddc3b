"""DeBERTa v2 without its convolution, and v3: DebertaV2ForMaskedLM."""

from megatfm.config import DisentangledBucketsConfig, ModelConfig, expect
from megatfm.convert.architectures.deberta import MASK_DECODER, OWN_HEAD
from megatfm.convert.encoder import AFTER_ATTENTION, POSITION_IDS, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import Json, only
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers, linear, same
from megatfm.errors import UsageError


def read(theirs: Json) -> ModelConfig:
    given: Json = {
        "relative_attention": False,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "position_buckets": -1,
    }
    given |= {"position_biased_input": True, "max_relative_positions": -1} | theirs
    only(given, relative_attention=True, position_biased_input=False, share_att_key=True)
    only(given, norm_rel_ebd="layer_norm", conv_kernel_size=0, embedding_size=theirs["hidden_size"])
    kinds = given.get("pos_att_type") or []
    if sorted(kinds.split("|") if isinstance(kinds, str) else kinds) != ["c2p", "p2c"]:
        raise UsageError(f"config.json: pos_att_type = {kinds!r} is not supported, only c2p and p2c together")
    if given["position_buckets"] < 1:
        raise UsageError(
            "config.json: position_buckets = -1 is not supported, only relative positions in buckets"
        )
    farthest = given["max_relative_positions"]
    return read_encoder(
        {"type_vocab_size": 0, "layer_norm_eps": 1e-7} | theirs,
        **{
            "attention.name": "disentangled_shared",
            "attention.bias": None,
            "position.name": "disentangled_buckets",
            "position.max_positions": None,
            "position.buckets": given["position_buckets"],
            "position.max_distance": farthest if farthest > 0 else theirs.get("max_position_embeddings", 512),
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
        read,
        write,
        rules,
        prefix="deberta.",
        ignored=(POSITION_IDS, MASK_DECODER),
        spellings=OWN_HEAD,
    )
)
