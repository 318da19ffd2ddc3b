"""Attention patterns that say no more than which pairs they hold."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.pattern import BlockBounds


@dataclass(frozen=True)
class Near(AttentionPattern):
    """The last `width` tokens."""

    width: int

    @property
    def is_relative(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (k <= q) & (k > q - self.width)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (k.first <= q.last) & (k.last > q.first - self.width)


@dataclass(frozen=True)
class Chunks(AttentionPattern):
    """Earlier tokens of the same chunk of the document, longer chunks in later heads."""

    size: int

    @property
    def differs_by_head(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        size = self.size + heads
        return (k <= q) & (k // size == q // size)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        size = self.size + heads
        return (k.first <= q.last) & (k.last // size >= q.first // size)
