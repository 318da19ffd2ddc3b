"""What a query sees: one pattern a file, a small frozen object from which masks, block tables and costs follow."""

from megatfm.layers.attention.patterns.chunked import Chunked
from megatfm.layers.attention.patterns.fixed import Fixed
from megatfm.layers.attention.patterns.full import Full
from megatfm.layers.attention.patterns.memory import Memory
from megatfm.layers.attention.patterns.pattern import Pattern, Seen, Span
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.layers.attention.patterns.strided import Strided
from megatfm.layers.attention.patterns.window import Window

__all__ = ["PATTERNS", "Chunked", "Fixed", "Full", "Memory", "Pattern", "Seen", "Span", "Strided", "Window"]
