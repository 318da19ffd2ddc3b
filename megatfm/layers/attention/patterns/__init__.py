"""Attention patterns: small frozen objects from which masks, tables of blocks, costs and sizes of caches follow."""

from megatfm.layers.attention.patterns import bigbird, local
from megatfm.layers.attention.patterns.pattern import PATTERNS, AttentionPattern

__all__ = ["PATTERNS", "AttentionPattern", "bigbird", "local"]
