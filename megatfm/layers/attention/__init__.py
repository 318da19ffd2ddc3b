"""Attention layers, registered in ATTENTIONS on import, together with the position encodings that they read."""

from megatfm.layers.attention import (
    deberta,
    gqa,
    linformer,
    longformer,
    memory_compressed,
    mla,
    shaw,
    windowed,
)
from megatfm.layers.attention.dot_product import ATTENTIONS

__all__ = [
    "ATTENTIONS",
    "deberta",
    "gqa",
    "linformer",
    "longformer",
    "memory_compressed",
    "mla",
    "shaw",
    "windowed",
]
