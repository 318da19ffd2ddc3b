"""What a query sees: one pattern a file, a small frozen object from which masks, block tables and costs follow."""

from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.chunked import Chunked
from megatfm.layers.attention.patterns.compressed import MemoryCompressedPattern
from megatfm.layers.attention.patterns.fixed import Fixed
from megatfm.layers.attention.patterns.full import Full, require_full
from megatfm.layers.attention.patterns.longformer import Longformer
from megatfm.layers.attention.patterns.memory import CrossAttentionPattern
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds
from megatfm.layers.attention.patterns.reach import global_query_indices, reachable_keys
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.layers.attention.patterns.seen import PatternMask
from megatfm.layers.attention.patterns.strided import Strided
from megatfm.layers.attention.patterns.window import Window

__all__ = [
    "PATTERNS",
    "AttentionPattern",
    "BigBird",
    "BlockBounds",
    "Chunked",
    "CrossAttentionPattern",
    "Fixed",
    "Full",
    "Longformer",
    "MemoryCompressedPattern",
    "PatternMask",
    "Strided",
    "Window",
    "global_query_indices",
    "reachable_keys",
    "require_full",
]
