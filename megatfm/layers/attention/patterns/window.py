"""The nearest tokens: a sliding window (Child et al. 2019; Beltagy et al. 2020; Jiang et al. 2023)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.config import ModelConfig, WindowPatternConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.full import Full
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds, Ranges
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.ops.attention.bands import BandLimits


@dataclass(frozen=True)
class Window(AttentionPattern):
    """Every `step`-th key from `left` tokens before the query to `right` after it, and the document's `first` ones.

    first: of causal windows only. Two sides, left and right, are multiples of `step`.
    """

    left: int
    right: int = 0
    step: int = 1
    first: int = 0

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.first or self.step > 1 else (self.left, self.right)

    @property
    def is_relative(self) -> bool:
        return not self.first

    @property
    def band(self) -> BandLimits | None:
        return None if self.first or self.step > 1 else BandLimits(self.left, self.right)

    @property
    def cache_window(self) -> int | None:
        return None if self.right else self.left

    @property
    def n_initial_kept(self) -> int:
        return self.first

    def key_ranges(self, first: int, last: int, length: int) -> Ranges:
        return (first - self.left, last + self.right), (0, min(self.first, last))

    def simplify(self, length: int) -> AttentionPattern:
        causal = self.right == 0
        everything = self.step == 1 and self.left >= length - 1 and (causal or self.right >= length - 1)
        return Full(causal) if everything else self

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        near = (k >= q - self.left) & (k <= q + self.right)
        if self.step > 1:
            near = near & ((q - k) % self.step == 0)
        return near | ((k < self.first) & (k <= q)) if self.first else near

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        # How far back the nearest and the farthest pair lie, and whether a step lies between.
        least, most = (q.first - k.last).clamp(min=-self.right), (q.last - k.first).clamp(max=self.left)
        near = most // self.step * self.step >= least
        return near | ((k.first < self.first) & (k.first <= q.last)) if self.first else near

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        if self.step > 1:
            return super().full_block_mask(q, k, heads)
        near = (k.first >= q.last - self.left) & (k.last <= q.first + self.right)
        return near | ((k.last < self.first) & (k.last <= q.first)) if self.first else near

    def pairs(self, length: int, n_heads: int = 1) -> float:
        places = torch.arange(length)
        before = places.clamp(max=self.left) // self.step
        after = (length - 1 - places).clamp(max=self.right) // self.step
        seen = length + int(before.sum()) + int(after.sum())
        if self.first:  # those that lie before the window, or between its steps
            k = torch.arange(min(self.first, length))[:, None]
            near = (k >= places - self.left) & ((places - k) % self.step == 0)
            seen += int(((k <= places) & ~near).sum())
        return seen


@PATTERNS.register("window")
def window(config: ModelConfig, causal: bool) -> Window:
    """`width` tokens up to the query in decoders; in encoders the query and half of `width` on each side."""
    options = require_variant(config.attention.pattern, WindowPatternConfig, "model.attention.pattern")
    if causal:
        return Window((options.width - 1) * options.dilation, 0, options.dilation, options.initial_tokens)
    if options.initial_tokens:
        raise UsageError(
            f"model.attention.pattern.initial_tokens = {options.initial_tokens}: an encoder's first tokens "
            f"would see no more than others "
            "do: leave it out, or choose a pattern with global tokens"
        )
    side = options.width // 2 * options.dilation
    return Window(side, side, options.dilation)
