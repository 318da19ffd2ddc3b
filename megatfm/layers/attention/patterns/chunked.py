"""Tokens of the same chunk of a document, as Llama 4's local layers see them."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.config import ChunkedPatternConfig, ModelConfig, require_variant
from megatfm.layers.attention.patterns.full import Full
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds, Ranges
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.ops.attention.bands import BandLimits


@dataclass(frozen=True)
class Chunked(AttentionPattern):
    """Keys of the query's chunk of `size` tokens; causal: no later ones."""

    size: int
    causal: bool

    @property
    def band(self) -> BandLimits:
        return BandLimits(None, 0 if self.causal else None, self.size)

    @property
    def cache_window(self) -> int | None:
        return self.size - 1 if self.causal else None

    def key_ranges(self, first: int, last: int, length: int) -> Ranges:
        end = last if self.causal else -(-last // self.size) * self.size
        return ((first // self.size * self.size, end),)

    def simplify(self, length: int) -> AttentionPattern:
        return Full(self.causal) if self.size >= length else self

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        same = q // self.size == k // self.size
        return same & (k <= q) if self.causal else same

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        same = (k.last // self.size >= q.first // self.size) & (k.first // self.size <= q.last // self.size)
        return same & (k.first <= q.last) if self.causal else same

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        chunk = q.first // self.size
        same = (
            (q.last // self.size == chunk) & (k.first // self.size == chunk) & (k.last // self.size == chunk)
        )
        return same & (k.last <= q.first) if self.causal else same

    def pairs(self, length: int, n_heads: int = 1) -> float:
        def of(tokens: int) -> float:
            return tokens * (tokens + 1) / 2 if self.causal else tokens * tokens

        return length // self.size * of(self.size) + of(length % self.size)


@PATTERNS.register("chunked")
def chunked(config: ModelConfig, causal: bool) -> Chunked:
    """Chunks count from the beginning of each document."""
    options = require_variant(config.attention.pattern, ChunkedPatternConfig, "model.attention.pattern")
    return Chunked(options.size, causal)
