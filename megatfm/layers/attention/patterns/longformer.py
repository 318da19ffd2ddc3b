"""Longformer (Beltagy et al. 2020): a window, and tokens that see all of the document and are seen by all of it."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.config import LongformerPatternConfig, ModelConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds, Ranges
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.ops.attention.bands import BandLimits


@dataclass(frozen=True)
class Longformer(AttentionPattern):
    """Keys up to `side` tokens away, and those at the places `tokens`, whose queries see all."""

    side: int
    tokens: tuple[int, ...]

    @property
    def band(self) -> BandLimits:
        return BandLimits(self.side, self.side, global_tokens=tuple(sorted(set(self.tokens))))

    def key_ranges(self, first: int, last: int, length: int) -> Ranges:
        return (first - self.side, last + self.side), *((token, token + 1) for token in self.tokens)

    def global_queries(self, length: int) -> Ranges:
        return tuple((token, token + 1) for token in self.tokens)

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        seen = (q - k).abs() <= self.side
        for token in self.tokens:
            seen = seen | (q == token) | (k == token)
        return seen

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        seen = (k.last >= q.first - self.side) & (k.first <= q.last + self.side)
        for token in self.tokens:
            for x in (q, k):
                seen = seen | ((x.first <= token) & (token <= x.last))
        return seen

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (k.first >= q.last - self.side) & (k.last <= q.first + self.side)


@PATTERNS.register("longformer")
def longformer(config: ModelConfig, causal: bool) -> Longformer:
    """Of encoders: what sees all leaks what is later."""
    options = require_variant(config.attention.pattern, LongformerPatternConfig, "model.attention.pattern")
    if causal:
        raise UsageError(
            "model.attention.pattern.name = 'longformer' has tokens that see all, later ones too: a decoder can't "
            "learn from that: choose family = 'encoder', or a window with `first`"
        )
    limit = config.position.limit
    if options.global_tokens and limit is not None and max(options.global_tokens) >= limit:
        raise UsageError(
            f"model.attention.pattern.global_tokens has the place {max(options.global_tokens)}, but model.position has "
            f"{limit} positions: name places below {limit}"
        )
    return Longformer(options.width // 2, options.global_tokens)
