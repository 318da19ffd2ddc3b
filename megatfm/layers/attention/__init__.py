"""Attention layers and the key-value cache."""

from megatfm.layers.attention import (
    compressed,
    disentangled,
    disentangled_shared,
    heads,
    latent,
    linformer,
    longformer,
)
from megatfm.layers.attention.cache import KVCache, LayerCache
from megatfm.layers.attention.core import DotProductAttention
from megatfm.layers.attention.registry import ATTENTIONS

__all__ = [
    "ATTENTIONS",
    "DotProductAttention",
    "KVCache",
    "LayerCache",
    "compressed",
    "disentangled",
    "disentangled_shared",
    "heads",
    "latent",
    "linformer",
    "longformer",
]
