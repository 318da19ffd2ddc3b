"""What the encoders of transformers have in common: keys of their config.json, and names as BERT has them."""

from collections.abc import Iterable
from typing import Any

from megatfm.config import ModelConfig
from megatfm.convert.config_keys import Json, Key, ignored, supported_values, used
from megatfm.convert.keys import activation, std, their_activation
from megatfm.convert.table import WeightMapping, rename, rename_linear

OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""As the checkpoints that came from TensorFlow call a norm's weight and bias."""
POSITION_IDS = r"embeddings\.position_ids$"
"""A buffer that older files hold."""

KEYS: dict[str, Key] = {
    "vocab_size": used(30522),
    "hidden_size": used(768),
    "num_hidden_layers": used(12),
    "num_attention_heads": used(12),
    "intermediate_size": used(3072),
    "hidden_act": used("gelu"),
    "hidden_dropout_prob": used(0.1),
    "attention_probs_dropout_prob": used(0.1),
    "max_position_embeddings": used(512),
    "type_vocab_size": used(2),
    "initializer_range": used(0.02),
    "layer_norm_eps": used(1e-12),
    "position_embedding_type": supported_values("absolute"),
    "tie_word_embeddings": supported_values(True),
}
"""Of BERT's config.json, with its defaults; others have the same with some more."""
POOLER = ignored(
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
)  # fmt: skip
"""Google's, of a part that transformers doesn't build from them."""
SUMMARY = ignored(
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "summary_last_dropout",
)  # fmt: skip
"""About heads over whole sequences."""


def read(theirs: Json, **others: Any) -> ModelConfig:
    """Our config of a post-norm encoder with learned positions and BERT's head.

    others: what differs; None: no such key. Raises UsageError for what we lack.
    """
    common = {
        "family": "encoder",
        "vocab_size": theirs["vocab_size"],
        "d_model": theirs["hidden_size"],
        "n_layers": theirs["num_hidden_layers"],
        "attention.n_heads": theirs["num_attention_heads"],
        "ffn.d_ff": theirs["intermediate_size"],
        "norm.name": "layer_norm",
        "norm.eps": theirs["layer_norm_eps"],
        "norm.placement": "post",
        "embedding.norm": True,
        "ffn.activation": activation(theirs["hidden_act"]),
        "attention.bias": True,
        "ffn.bias": True,
        "position.name": "learned",
        "position.max_positions": theirs["max_position_embeddings"],
        "embedding.n_segments": theirs["type_vocab_size"],
        "lm_head.name": "transform",
        "lm_head.bias": True,
        "dropout": theirs["hidden_dropout_prob"],
        "attention.dropout": theirs["attention_probs_dropout_prob"],
        "init.name": "bert",
        "init.std": theirs["initializer_range"],
    }
    return ModelConfig.from_dotted(
        {key: value for key, value in (common | others).items() if value is not None}
    )


def write(ours: ModelConfig, **others: Any) -> Json:
    """The same back. Raises UsageError for an activation that they lack."""
    common = {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.d_model,
        "num_hidden_layers": ours.n_layers,
        "num_attention_heads": ours.attention.n_heads,
        "intermediate_size": ours.ffn.d_ff,
        "hidden_act": their_activation(ours.ffn.activation),
        "layer_norm_eps": ours.norm.eps,
        "max_position_embeddings": ours.position.limit,
        "type_vocab_size": max(ours.embedding.n_segments, 1),
        "hidden_dropout_prob": ours.dropout,
        "attention_probs_dropout_prob": ours.attention.dropout,
        "initializer_range": std(ours),
        "tie_word_embeddings": True,
    }
    return common | others


def embedding(theirs: str, *, copies: Iterable[str] = ()) -> list[WeightMapping]:
    """Tables and norm under `theirs`, such as "bert.embeddings."; copies: names of the output matrix."""
    return [
        rename("encoder.embedding.tokens.weight", f"{theirs}word_embeddings.weight", copies=copies),
        rename("encoder.embedding.positions.weight", f"{theirs}position_embeddings.weight"),
        rename("encoder.embedding.segments.weight", f"{theirs}token_type_embeddings.weight"),
        *rename_linear("encoder.embedding.norm", f"{theirs}LayerNorm", bias=True),
    ]


SELF_ATTENTION = [
    *rename_linear("attn.wq", "attention.self.query", bias=True),
    *rename_linear("attn.wk", "attention.self.key", bias=True),
    *rename_linear("attn.wv", "attention.self.value", bias=True),
]
AFTER_ATTENTION = [
    *rename_linear("attn.wo", "attention.output.dense", bias=True),
    *rename_linear("attn_residual.norm", "attention.output.LayerNorm", bias=True),
    *rename_linear("ffn.w_up", "intermediate.dense", bias=True),
    *rename_linear("ffn.w_down", "output.dense", bias=True),
    *rename_linear("ffn_residual.norm", "output.LayerNorm", bias=True),
]
BLOCK = [*SELF_ATTENTION, *AFTER_ATTENTION]
"""A block of BERT, RoBERTa and ELECTRA."""


def head(transform: str, norm: str, bias: str, copies: Iterable[str] = ()) -> list[WeightMapping]:
    """Dense layer, norm and bias of the output head; copies: further names of the bias."""
    return [
        *rename_linear("head.transform.dense", transform, bias=True),
        *rename_linear("head.transform.norm", norm, bias=True),
        rename("head.bias", bias, copies=copies),
    ]
