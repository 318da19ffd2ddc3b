"""What a query sees: one pattern a file, a small frozen object from which masks, block tables and costs follow."""

from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.chunked import Chunked
from megatfm.layers.attention.patterns.compressed import Compressed
from megatfm.layers.attention.patterns.fixed import Fixed
from megatfm.layers.attention.patterns.full import Full, require_full
from megatfm.layers.attention.patterns.longformer import Longformer
from megatfm.layers.attention.patterns.memory import Memory
from megatfm.layers.attention.patterns.pattern import Pattern, Span
from megatfm.layers.attention.patterns.reach import reached, wide_queries
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.layers.attention.patterns.seen import Seen
from megatfm.layers.attention.patterns.strided import Strided
from megatfm.layers.attention.patterns.window import Window

__all__ = [
    "PATTERNS",
    "BigBird",
    "Chunked",
    "Compressed",
    "Fixed",
    "Full",
    "Longformer",
    "Memory",
    "Pattern",
    "Seen",
    "Span",
    "Strided",
    "Window",
    "reached",
    "require_full",
    "wide_queries",
]
