"""DeBERTa: DebertaForMaskedLM. Queries, keys and values are one matrix, head by head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatfm.config import DisentangledPositionConfig, ModelConfig, expect
from megatfm.convert import encoder
from megatfm.convert.config_keys import Json, idle, only, taken
from megatfm.convert.encoder import AFTER_ATTENTION, POSITION_IDS, head
from megatfm.convert.encoder import read as read_encoder
from megatfm.convert.encoder import write as write_encoder
from megatfm.convert.keys import derived
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, layers, linear, same
from megatfm.errors import UsageError

KEYS = encoder.KEYS | {
    "vocab_size": taken(50265),
    "type_vocab_size": taken(0),
    "layer_norm_eps": taken(1e-7),
    "relative_attention": only(True, default=False),
    "position_biased_input": only(False, default=True),
    "pos_att_type": taken(None, str, list, None),
    "max_relative_positions": taken(-1),
    "embedding_size": taken(None, int),
    "pad_token_id": taken(0, int, None),
    "talking_head": only(False),
    **idle("legacy", kinds=[bool]),
    **idle("pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "cls_dropout", "padding_idx"),
}


def check_kinds(kinds: Any) -> None:
    """Raise UsageError unless positions are related to contents both ways."""
    if (kinds.split("|") if isinstance(kinds, str) else kinds or []) not in (["c2p", "p2c"], ["p2c", "c2p"]):
        raise UsageError(f"config.json: pos_att_type = {kinds!r} is not supported, only c2p and p2c together")


def read(theirs: Json) -> ModelConfig:
    derived(theirs, embedding_size=theirs["hidden_size"])
    check_kinds(theirs["pos_att_type"])
    farthest = theirs["max_relative_positions"]
    return read_encoder(
        theirs,
        **{
            "attention.name": "disentangled",
            "attention.bias": None,
            "position.name": "disentangled",
            "position.max_positions": None,
            "position.max_distance": farthest if farthest > 0 else theirs["max_position_embeddings"],
            "init.name": "normal",
        },
    )


def write(ours: ModelConfig) -> Json:
    return write_encoder(
        ours,
        max_position_embeddings=expect(
            ours.position, DisentangledPositionConfig, "model.position"
        ).max_distance,
        max_relative_positions=-1,
        type_vocab_size=ours.embedding.n_segments,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["c2p", "p2c"],
    )


def by_head(n_heads: int) -> Rule:
    """For each head its queries, keys and values, below one another."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([x.unflatten(0, (n_heads, -1)) for x in tensors], dim=1).flatten(0, 2)]

    def back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.flatten(0, 1) for x in tensors[0].unflatten(0, (n_heads, 3, -1)).unbind(1)]

    ours = tuple(f"attn.w{part}.weight" for part in "qkv")
    return Rule(ours, ("attention.self.in_proj.weight",), forth, back)


def rules(config: ModelConfig) -> list[Rule]:
    block = [
        by_head(config.attention.n_heads),
        same("attn.wq.bias", "attention.self.q_bias"),
        same("attn.wv.bias", "attention.self.v_bias"),
        *linear("attn.wk_position", "attention.self.pos_proj"),
        *linear("attn.wq_position", "attention.self.pos_q_proj", bias=True),
        *AFTER_ATTENTION,
    ]
    segments = same("encoder.embedding.segments.weight", "deberta.embeddings.token_type_embeddings.weight")
    return [
        same(
            "encoder.embedding.tokens.weight",
            "deberta.embeddings.word_embeddings.weight",
            copies=["cls.predictions.decoder.weight"],
        ),
        *([segments] if config.embedding.n_segments else []),
        *linear("encoder.embedding.norm", "deberta.embeddings.LayerNorm", bias=True),
        same("encoder.position.table.weight", "deberta.encoder.rel_embeddings.weight"),
        *layers(config.n_layers, "encoder.layers.", "deberta.encoder.layer.", block),
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
        prefix="deberta.",
        ignored=(POSITION_IDS, MASK_DECODER),
        spellings=OWN_HEAD,
        marks={"family": "encoder", "attention.name": "disentangled"},
    )
)
register_bare("DebertaModel", ARCHITECTURES.get("DebertaForMaskedLM"))
