"""All tokens of the document, or in decoders those up to the query itself (Vaswani et al. 2017)."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import Pattern, Span
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.ops.attention import Plain
from megatfm.ops.attention.bands import Sides


@dataclass(frozen=True)
class Full(Pattern):
    """All keys, or no later ones."""

    causal: bool = False

    @property
    def plain(self) -> Plain:
        return "causal" if self.causal else "all"

    @property
    def window(self) -> tuple[int, int]:
        return (-1, 0) if self.causal else (-1, -1)

    @property
    def is_relative(self) -> bool:
        return True

    @property
    def sides(self) -> Sides:
        return Sides(None, 0 if self.causal else None)

    def sees(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return k <= q if self.causal else (q == q) & (k == k)

    def blocks(self, q: Span, k: Span, heads: Tensor) -> Tensor:
        return k.first <= q.last if self.causal else super().blocks(q, k, heads)

    def whole(self, q: Span, k: Span, heads: Tensor) -> Tensor:
        return k.last <= q.first if self.causal else super().blocks(q, k, heads)

    def pairs(self, length: int, n_heads: int = 1) -> float:
        return length * (length + 1) / 2 if self.causal else length * length


def require_full(config: ModelConfig) -> None:
    """Raises UsageError for another pattern, with attention that has to see all."""
    pattern = config.attention.pattern.name
    if pattern != "full":
        raise UsageError(
            f"model.attention.pattern = {pattern!r}: attention.name = {config.attention.name!r} looks at all tokens: "
            "leave the pattern out, or set model.attention.name = 'heads'"
        )


@PATTERNS.register("full")
def full(config: ModelConfig, causal: bool) -> Full:
    """Full attention, causal in decoders."""
    return Full(causal)
