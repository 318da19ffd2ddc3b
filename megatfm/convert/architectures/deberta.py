"""DeBERTa, v2 without its convolution, and v3: DebertaForMaskedLM, DebertaV2ForMaskedLM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatfm.config import DebertaPositionConfig, DebertaV2PositionConfig, ModelConfig, require_variant
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures.bert import (
    AFTER_ATTENTION,
    ENCODER_KEYS,
    POSITION_IDS,
    PREDICTION_HEAD,
    read_encoder,
    write_encoder,
)
from megatfm.convert.hf_config import Json, Key, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import check_implied_values
from megatfm.convert.weight_mapping import WeightMapping, map_layers, map_name, rename_linear
from megatfm.errors import UsageError

DEBERTA_KEYS = ENCODER_KEYS | {
    **used(
        vocab_size=50265, type_vocab_size=0, layer_norm_eps=1e-7, pos_att_type=(None, str, list, None),
        max_relative_positions=-1, embedding_size=(None, int), pad_token_id=(0, int, None),
    ),
    "relative_attention": Key(False, (bool,), (True,)),
    "position_biased_input": Key(True, (bool,), (False,)),
    **supported_values(talking_head=False),
    **ignored("legacy", kinds=[bool]),
    **ignored("pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "cls_dropout", "padding_idx"),
}  # fmt: skip


def check_pos_att_type(value: Any) -> None:
    """Raise UsageError unless attention has both content-to-position and position-to-content terms."""
    terms = value.split("|") if isinstance(value, str) else value or []
    if terms not in (["c2p", "p2c"], ["p2c", "c2p"]):
        raise UsageError(f"config.json: pos_att_type = {value!r} is not supported, only c2p and p2c together")


def read_deberta(hf_config: Json, name: str = "deberta", **options: Any) -> ModelConfig:
    """Read a DeBERTa. name: of attention and positions. options: megatfm's keys that differ. Raises UsageError."""
    check_implied_values(hf_config, embedding_size=hf_config["hidden_size"])
    check_pos_att_type(hf_config["pos_att_type"])
    max_distance = hf_config["max_relative_positions"]
    if max_distance <= 0:
        max_distance = hf_config["max_position_embeddings"]
    return read_encoder(
        hf_config,
        **{
            "attention.name": name,
            "attention.bias": None,
            "position.name": name,
            "position.max_positions": None,
            "position.max_distance": max_distance,
            "init.name": "normal",
            **options,
        },
    )


def write_deberta(config: ModelConfig) -> Json:
    position = require_variant(config.position, DebertaPositionConfig, "model.position")
    return _write_with(config, position.max_distance, pos_att_type=["c2p", "p2c"])


def _write_with(config: ModelConfig, max_distance: int, **keys: Any) -> Json:
    """Write config.json. keys: of transformers that differ between the versions."""
    return write_encoder(
        config,
        max_position_embeddings=max_distance,
        max_relative_positions=-1,
        type_vocab_size=config.embedding.n_segments,
        relative_attention=True,
        position_biased_input=False,
        **keys,
    )


def map_qkv_by_head(n_heads: int) -> WeightMapping:
    """Map the projections of queries, keys and values to one matrix, whose rows are ordered by head, then q, k, v."""

    def to_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([x.unflatten(0, (n_heads, -1)) for x in tensors], dim=1).flatten(0, 2)]

    def from_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [x.flatten(0, 1) for x in tensors[0].unflatten(0, (n_heads, 3, -1)).unbind(1)]

    names = tuple(f"attn.w{part}.weight" for part in "qkv")
    return WeightMapping(names, ("attention.self.in_proj.weight",), to_hf, from_hf)


def map_deberta(config: ModelConfig) -> list[WeightMapping]:
    """Map the first version, which has projections of positions in each block."""
    block = [
        map_qkv_by_head(config.attention.n_heads),
        map_name("attn.wq.bias", "attention.self.q_bias"),
        map_name("attn.wv.bias", "attention.self.v_bias"),
        *rename_linear("attn.wk_position", "attention.self.pos_proj"),
        *rename_linear("attn.wq_position", "attention.self.pos_q_proj", bias=True),
        *AFTER_ATTENTION,
    ]
    return _map_model(config, block, position_norm=False)


def _map_model(config: ModelConfig, block: Sequence[WeightMapping], *, position_norm: bool) -> list[WeightMapping]:
    """Map embeddings, blocks and head. block: mappings of one block. position_norm: of the table of distances."""
    segments = map_name("encoder.embedding.segments.weight", "deberta.embeddings.token_type_embeddings.weight")
    copies = ["cls.predictions.decoder.weight"]
    return [
        map_name("encoder.embedding.tokens.weight", "deberta.embeddings.word_embeddings.weight", copies=copies),
        *([segments] if config.embedding.n_segments else []),
        *rename_linear("encoder.embedding.norm", "deberta.embeddings.LayerNorm", bias=True),
        map_name("encoder.position.table.weight", "deberta.encoder.rel_embeddings.weight"),
        *(rename_linear("encoder.position.norm", "deberta.encoder.LayerNorm", bias=True) * position_norm),
        *map_layers(config.n_layers, "encoder.layers.", "deberta.encoder.layer.", block),
        *PREDICTION_HEAD,
    ]


MASK_DECODER = r"^deberta\.embeddings\.position_embeddings\."
"""Absolute positions of the enhanced mask decoder, which neither megatfm nor transformers has."""
MICROSOFT_HEAD = (
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    (r"^lm_predictions\.lm_head\.", "cls.predictions.transform."),
)
"""Microsoft's names of the head, which transformers reads with legacy=false."""

register_architecture(
    "DebertaForMaskedLM",
    Architecture(
        "deberta",
        DEBERTA_KEYS,
        read_deberta,
        write_deberta,
        map_deberta,
        base_model_prefix="deberta.",
        ignored_tensors=(POSITION_IDS, MASK_DECODER),
        legacy_names=MICROSOFT_HEAD,
        fingerprint={"family": "encoder", "attention.name": "deberta"},
    ),
    base="DebertaModel",
)

# DeBERTa v2 and v3

DEBERTA_V2_KEYS = omit_keys(DEBERTA_KEYS, "talking_head") | {
    **used(
        vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24, intermediate_size=6144,
        position_buckets=-1, attention_head_size=(None, int),
    ),
    "share_att_key": Key(False, (bool,), (True,)),
    "norm_rel_ebd": Key("none", (str,), ("layer_norm",)),
    **supported_values(conv_kernel_size=0),
    **ignored("conv_act", "conv_groups"),
}  # fmt: skip


def read_deberta_v2(hf_config: Json) -> ModelConfig:
    """Read v2 or v3. Raises UsageError."""
    head_size = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    check_implied_values(hf_config, attention_head_size=head_size)
    if hf_config["position_buckets"] < 1:
        raise UsageError("config.json: position_buckets = -1 is not supported, only relative positions in buckets")
    return read_deberta(hf_config, "deberta_v2", **{"position.buckets": hf_config["position_buckets"]})


def write_deberta_v2(config: ModelConfig) -> Json:
    position = require_variant(config.position, DebertaV2PositionConfig, "model.position")
    return _write_with(
        config,
        position.max_distance,
        position_buckets=position.buckets,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        pos_att_type=["p2c", "c2p"],
    )


def map_deberta_v2(config: ModelConfig) -> list[WeightMapping]:
    block = [
        *rename_linear("attn.wq", "attention.self.query_proj", bias=True),
        *rename_linear("attn.wk", "attention.self.key_proj", bias=True),
        *rename_linear("attn.wv", "attention.self.value_proj", bias=True),
        *AFTER_ATTENTION,
    ]
    return _map_model(config, block, position_norm=True)


register_architecture(
    "DebertaV2ForMaskedLM",
    Architecture(
        "deberta-v2",
        DEBERTA_V2_KEYS,
        read_deberta_v2,
        write_deberta_v2,
        map_deberta_v2,
        base_model_prefix="deberta.",
        ignored_tensors=(POSITION_IDS, MASK_DECODER),
        legacy_names=MICROSOFT_HEAD,
        fingerprint={"family": "encoder", "attention.name": "deberta_v2"},
    ),
    base="DebertaV2Model",
)
