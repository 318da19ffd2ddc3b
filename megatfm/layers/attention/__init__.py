"""Attention layers and the key-value cache."""

from megatfm.layers.attention.cache import KVCache, LayerCache
from megatfm.layers.attention.causal import CausalAttention, CausalCore

__all__ = ["CausalAttention", "CausalCore", "KVCache", "LayerCache"]
