"""All tokens of the memory's document of the same number: what cross-attention sees."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.ops.attention import BuiltinMask


@dataclass(frozen=True)
class CrossAttentionPattern(AttentionPattern):
    """The whole memory."""

    @property
    def builtin_mask(self) -> BuiltinMask:
        return "all"

    @property
    def is_cross_attention(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (q == q) & (k == k)
