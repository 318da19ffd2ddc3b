"""The nearest tokens: a sliding window (Child et al. 2019; Beltagy et al. 2020; Jiang et al. 2023)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.config import ModelConfig, WindowPatternConfig, expect
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.full import Full
from megatfm.layers.attention.patterns.pattern import Pattern, Runs, Span
from megatfm.layers.attention.patterns.registry import PATTERNS
from megatfm.ops.attention.bands import Sides


@dataclass(frozen=True)
class Window(Pattern):
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
    def sides(self) -> Sides | None:
        return None if self.first or self.step > 1 else Sides(self.left, self.right)

    @property
    def keeps(self) -> int | None:
        return None if self.right else self.left

    @property
    def keeps_first(self) -> int:
        return self.first

    def reach(self, first: int, last: int, length: int) -> Runs:
        return (first - self.left, last + self.right), (0, min(self.first, last))

    def within(self, length: int) -> Pattern:
        causal = self.right == 0
        everything = self.step == 1 and self.left >= length - 1 and (causal or self.right >= length - 1)
        return Full(causal) if everything else self

    def sees(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        near = (k >= q - self.left) & (k <= q + self.right)
        if self.step > 1:
            near = near & ((q - k) % self.step == 0)
        return near | ((k < self.first) & (k <= q)) if self.first else near

    def blocks(self, q: Span, k: Span, heads: Tensor) -> Tensor:
        # How far back the nearest and the farthest pair lie, and whether a step lies between.
        least, most = (q.first - k.last).clamp(min=-self.right), (q.last - k.first).clamp(max=self.left)
        near = most // self.step * self.step >= least
        return near | ((k.first < self.first) & (k.first <= q.last)) if self.first else near

    def whole(self, q: Span, k: Span, heads: Tensor) -> Tensor:
        if self.step > 1:
            return super().whole(q, k, heads)
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
    options = expect(config.attention.pattern, WindowPatternConfig, "model.attention.pattern")
    if causal:
        return Window((options.width - 1) * options.step, 0, options.step, options.first)
    if options.first:
        raise UsageError(
            f"model.attention.pattern.first = {options.first}: an encoder's first tokens would see no more than others "
            "do: leave it out, or choose a pattern with global tokens"
        )
    side = options.width // 2 * options.step
    return Window(side, side, options.step)
