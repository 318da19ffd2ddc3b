"""All tokens of the document, or in decoders those up to the query itself (Vaswani et al. 2017)."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.ops.attention import BuiltinMask
from megatfm.ops.attention.bands import BandLimits


@dataclass(frozen=True)
class Full(AttentionPattern):
    """All keys, or no later ones."""

    causal: bool = False

    @property
    def builtin_mask(self) -> BuiltinMask:
        return "causal" if self.causal else "all"

    @property
    def window(self) -> tuple[int, int]:
        return (-1, 0) if self.causal else (-1, -1)

    @property
    def is_relative(self) -> bool:
        return True

    @property
    def band(self) -> BandLimits:
        return BandLimits(None, 0 if self.causal else None)

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return k <= q if self.causal else (q == q) & (k == k)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return k.first <= q.last if self.causal else super().block_mask(q, k, heads)

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return k.last <= q.first if self.causal else super().block_mask(q, k, heads)

    def pairs(self, length: int, n_heads: int = 1) -> float:
        return length * (length + 1) / 2 if self.causal else length * length


def require_full(config: ModelConfig) -> None:
    """Raises UsageError for another pattern, with attention that has to see all."""
    pattern = config.attention.pattern.name
    if pattern != "full":
        raise UsageError(
            f"model.attention.pattern = {pattern!r}: attention.name = {config.attention.name!r} looks at all tokens: "
            "leave the pattern out, or set model.attention.name = 'gqa'"
        )


@PATTERNS.register("full")
def full(config: ModelConfig, causal: bool) -> Full:
    """Full attention, causal in decoders."""
    return Full(causal)
