"""DeBERTa: DebertaForMaskedLM. Queries, keys and values are one matrix, head by head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatfm.config import DebertaPositionConfig, ModelConfig, require_variant
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, ignored, supported_values, used
from megatfm.convert.encoder import AFTER_ATTENTION, POSITION_IDS, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import check_implied_values
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename, rename_linear
from megatfm.errors import UsageError

KEYS = encoder.KEYS | {
    "vocab_size": used(50265),
    "type_vocab_size": used(0),
    "layer_norm_eps": used(1e-7),
    "relative_attention": supported_values(True, default=False),
    "position_biased_input": supported_values(False, default=True),
    "pos_att_type": used(None, str, list, None),
    "max_relative_positions": used(-1),
    "embedding_size": used(None, int),
    "pad_token_id": used(0, int, None),
    "talking_head": supported_values(False),
    **ignored("legacy", kinds=[bool]),
    **ignored("pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "cls_dropout", "padding_idx"),
}


def check_kinds(kinds: Any) -> None:
    """Raise UsageError unless positions are related to contents both ways."""
    if (kinds.split("|") if isinstance(kinds, str) else kinds or []) not in (["c2p", "p2c"], ["p2c", "c2p"]):
        raise UsageError(f"config.json: pos_att_type = {kinds!r} is not supported, only c2p and p2c together")


def read(theirs: Json) -> ModelConfig:
    check_implied_values(theirs, embedding_size=theirs["hidden_size"])
    check_kinds(theirs["pos_att_type"])
    farthest = theirs["max_relative_positions"]
    return read_encoder(
        theirs,
        **{
            "attention.name": "deberta",
            "attention.bias": None,
            "position.name": "deberta",
            "position.max_positions": None,
            "position.max_distance": farthest if farthest > 0 else theirs["max_position_embeddings"],
            "init.name": "normal",
        },
    )


def write(ours: ModelConfig) -> Json:
    return write_encoder(
        ours,
        max_position_embeddings=require_variant(
            ours.position, DebertaPositionConfig, "model.position"
        ).max_distance,
        max_relative_positions=-1,
        type_vocab_size=ours.embedding.n_segments,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["c2p", "p2c"],
    )


def by_head(n_heads: int) -> WeightMapping:
    """For each head its queries, keys and values, below one another."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([x.unflatten(0, (n_heads, -1)) for x in tensors], dim=1).flatten(0, 2)]

    def back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.flatten(0, 1) for x in tensors[0].unflatten(0, (n_heads, 3, -1)).unbind(1)]

    ours = tuple(f"attn.w{part}.weight" for part in "qkv")
    return WeightMapping(ours, ("attention.self.in_proj.weight",), forth, back)


def rules(config: ModelConfig) -> list[WeightMapping]:
    block = [
        by_head(config.attention.n_heads),
        rename("attn.wq.bias", "attention.self.q_bias"),
        rename("attn.wv.bias", "attention.self.v_bias"),
        *rename_linear("attn.wk_position", "attention.self.pos_proj"),
        *rename_linear("attn.wq_position", "attention.self.pos_q_proj", bias=True),
        *AFTER_ATTENTION,
    ]
    segments = rename("encoder.embedding.segments.weight", "deberta.embeddings.token_type_embeddings.weight")
    return [
        rename(
            "encoder.embedding.tokens.weight",
            "deberta.embeddings.word_embeddings.weight",
            copies=["cls.predictions.decoder.weight"],
        ),
        *([segments] if config.embedding.n_segments else []),
        *rename_linear("encoder.embedding.norm", "deberta.embeddings.LayerNorm", bias=True),
        rename("encoder.position.table.weight", "deberta.encoder.rel_embeddings.weight"),
        *per_layer(config.n_layers, "encoder.layers.", "deberta.encoder.layer.", block),
        *head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            copies=["cls.predictions.decoder.bias"],
        ),
    ]


MASK_DECODER = r"^deberta\.embeddings\.position_embeddings\."
"""Absolute positions, read by the enhanced mask decoder only, which transformers lacks as well."""
OWN_HEAD = (
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    (r"^lm_predictions\.lm_head\.", "cls.predictions.transform."),
)
"""Microsoft's own names of the head, which transformers takes with legacy=false."""

ARCHITECTURES.register("DebertaForMaskedLM")(
    Architecture(
        "deberta",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="deberta.",
        ignored_tensors=(POSITION_IDS, MASK_DECODER),
        legacy_names=OWN_HEAD,
        fingerprint={"family": "encoder", "attention.name": "deberta"},
    )
)
register_base_model("DebertaModel", ARCHITECTURES.get("DebertaForMaskedLM"))
