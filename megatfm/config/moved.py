"""Where the keys of earlier versions went."""

from collections.abc import Mapping
from typing import Any

SECTIONS = ("attention", "ffn", "norm", "position", "embedding", "init")
"""Keys that held a part's name and are its section now."""

MOVED = {
    "n_heads": "attention.n_heads",
    "n_kv_heads": "attention.n_kv_heads",
    "head_dim": "attention.head_dim",
    "attention_bias": "attention.bias",
    "attention_scale": "attention.scale",
    "attention_softcap": "attention.softcap",
    "attention_dropout": "attention.dropout",
    "qk_norm": "attention.qk_norm",
    "d_ff": "ffn.d_ff",
    "activation": "ffn.activation",
    "ffn_bias": "ffn.bias",
    "ffn_dropout": "ffn.dropout",
    "norm_eps": "norm.eps",
    "norm_position": "norm.placement",
    "final_norm": "norm.final_norm",
    "max_positions": "position.max_positions",
    "position_offset": "position.offset",
    "rope_theta": "position.theta",
    "rope_scaling": "position.scaling",
    "relative_buckets": "position.buckets",
    "relative_distance": "position.max_distance",
    "embedding_dim": "embedding.dim",
    "embedding_scale": "embedding.scale",
    "embedding_norm": "embedding.norm",
    "n_segments": "embedding.n_segments",
    "tie_embeddings": "embedding.tied",
    "head_bias": "lm_head.bias",
    "head_scale": "lm_head.scale",
    "logit_softcap": "lm_head.softcap",
    "label_smoothing": "lm_head.label_smoothing",
    "init_std": "init.std",
    "sentence_classes": "extra_heads.sentence.classes",
    "boundary_head": "extra_heads.boundary",
}
"""A key of `[model]` in versions whose model had one flat section, and its place in the sections of today."""


def reject_renamed_keys(values: Any) -> None:
    """Raises ValueError that names every key of an earlier version in `[model]`, and its place now."""
    if not isinstance(values, Mapping):
        return
    found = []
    for key, value in values.items():
        if key == "latent":
            found += [(f"latent.{inner}", f"attention.{inner}") for inner in value or {}]
        elif key in MOVED:
            found.append((key, MOVED[key]))
        elif key in SECTIONS and isinstance(value, str):
            found.append((key, f"{key}.name"))
    if found:
        raise ValueError(
            f"keys that have moved into sections: {', '.join(f'{old} is model.{new} now' for old, new in found)}"
        )
