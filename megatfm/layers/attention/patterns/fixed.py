"""The own stretch, and the ends of the others (Sparse Transformer's fixed pattern; Child et al. 2019, section 4)."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.config import FixedPatternConfig, ModelConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds
from megatfm.layers.attention.patterns.registry import PATTERNS


@dataclass(frozen=True)
class Fixed(AttentionPattern):
    """Keys of the query's stretch of `stride` tokens, and the last `summary` of each; causal: no later ones."""

    stride: int
    summary: int
    causal: bool

    @property
    def has_uneven_work(self) -> bool:
        return self.causal

    @property
    def sees_later(self) -> bool:
        return not self.causal

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        seen = (q // self.stride == k // self.stride) | (k % self.stride >= self.stride - self.summary)
        return seen & (k <= q) if self.causal else seen

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        first, last = k.first // self.stride, k.last // self.stride
        ends = (last > first) | (k.last % self.stride >= self.stride - self.summary)
        seen = ends | ((last >= q.first // self.stride) & (first <= q.last // self.stride))
        return seen & (k.first <= q.last) if self.causal else seen

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        own = q.first // self.stride
        seen = (
            (q.last // self.stride == own) & (k.first // self.stride == own) & (k.last // self.stride == own)
        )
        return seen & (k.last <= q.first) if self.causal else seen


@PATTERNS.register("fixed")
def fixed(config: ModelConfig, causal: bool) -> Fixed:
    """Both of the paper's heads in one, its "merged" form."""
    options = require_variant(config.attention.pattern, FixedPatternConfig, "model.attention.pattern")
    if options.n_summary_tokens >= options.stride:
        raise UsageError(
            f"model.attention.pattern.n_summary_tokens = {options.n_summary_tokens} is all of stride = "
            f"{options.stride}: that is full "
            "attention: choose fewer, or pattern = 'full'"
        )
    return Fixed(options.stride, options.n_summary_tokens, causal)
