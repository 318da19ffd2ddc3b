"""The last tokens, and every so-manieth before (Sparse Transformer's strided pattern; Child et al. 2019, section 4)."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.config import ModelConfig, StridedPatternConfig, require_variant
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds
from megatfm.layers.attention.patterns.registry import PATTERNS


@dataclass(frozen=True)
class Strided(AttentionPattern):
    """Keys fewer than `stride` tokens away, and those a multiple of it away; causal: no later ones."""

    stride: int
    causal: bool

    @property
    def has_uneven_work(self) -> bool:
        return self.causal

    @property
    def sees_later(self) -> bool:
        return not self.causal

    @property
    def is_relative(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        away = q - k
        seen = (away.abs() < self.stride) | (away % self.stride == 0)
        return seen & (away >= 0) if self.causal else seen

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        # The nearest and the farthest pair of two blocks, and whether a multiple lies between.
        least, most = q.first - k.last, q.last - k.first
        seen = (most // self.stride * self.stride >= least) | ((least < self.stride) & (most > -self.stride))
        return seen & (most >= 0) if self.causal else seen

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        least, most = q.first - k.last, q.last - k.first
        return (most < self.stride) & (least >= 0 if self.causal else least > -self.stride)


@PATTERNS.register("strided")
def strided(config: ModelConfig, causal: bool) -> Strided:
    """Both of the paper's heads in one, its "merged" form."""
    options = require_variant(config.attention.pattern, StridedPatternConfig, "model.attention.pattern")
    return Strided(options.stride, causal)
