"""What a query sees: one pattern a file, a small frozen object from which masks, block tables and costs follow."""

from megatfm.layers.attention.patterns.full import Full
from megatfm.layers.attention.patterns.memory import Memory
from megatfm.layers.attention.patterns.pattern import Pattern, Seen, Span
from megatfm.layers.attention.patterns.registry import PATTERNS

__all__ = ["PATTERNS", "Full", "Memory", "Pattern", "Seen", "Span"]
