"""All tokens of the memory's document of the same number: what cross-attention sees."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.layers.attention.patterns.pattern import Pattern
from megatfm.ops.attention import Plain


@dataclass(frozen=True)
class Memory(Pattern):
    """The whole memory."""

    @property
    def plain(self) -> Plain:
        return "all"

    @property
    def of_memory(self) -> bool:
        return True

    def sees(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (q == q) & (k == k)
