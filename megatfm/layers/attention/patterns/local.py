"""Patterns in closed form: full, cross-attention, window, chunked, strided, fixed and Longformer's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.config import (
    ChunkedPatternConfig,
    FixedPatternConfig,
    LongformerPatternConfig,
    ModelConfig,
    StridedPatternConfig,
    WindowPatternConfig,
    require_variant,
)
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import PATTERNS, AttentionPattern, BlockBounds, Ranges
from megatfm.ops.attention.mask import BandLimits, BuiltinMask


@dataclass(frozen=True)
class Full(AttentionPattern):
    """Full attention; causal: to the query itself and earlier keys only."""

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

    def count_pairs(self, length: int, n_heads: int = 1) -> float:
        return length * (length + 1) / 2 if self.causal else length * length


def require_full(config: ModelConfig) -> None:
    """Raise UsageError for a sparse pattern, for attention layers that support full attention only."""
    pattern = config.attention.pattern.name
    if pattern != "full":
        raise UsageError(
            f"model.attention.pattern = {pattern!r}: attention.name = {config.attention.name!r} supports full "
            "attention only: leave the pattern out, or set model.attention.name = 'gqa'"
        )


@PATTERNS.register("full")
def full(config: ModelConfig, causal: bool) -> Full:
    """Make full attention, causal in decoders."""
    return Full(causal)


@dataclass(frozen=True)
class CrossAttentionPattern(AttentionPattern):
    """Every query sees all of the encoder's document of the same id."""

    @property
    def builtin_mask(self) -> BuiltinMask:
        return "all"

    @property
    def is_cross_attention(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (q == q) & (k == k)


@dataclass(frozen=True)
class Window(AttentionPattern):
    """A sliding window from `left` tokens before the query to `right` after it, with dilation `step`.

    first: number of the document's first tokens that all queries see too (attention sinks); causal windows only.
    left and right are multiples of `step`.
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
        sees_all = self.step == 1 and self.left >= length - 1 and (causal or self.right >= length - 1)
        return Full(causal) if sees_all else self

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        in_window = (k >= q - self.left) & (k <= q + self.right)
        if self.step > 1:
            in_window = in_window & ((q - k) % self.step == 0)
        return in_window | ((k < self.first) & (k <= q)) if self.first else in_window

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        # Is there a multiple of the dilation between the distances of the nearest and the farthest pair?
        min_distance, max_distance = (q.first - k.last).clamp(min=-self.right), (q.last - k.first).clamp(max=self.left)
        in_window = max_distance // self.step * self.step >= min_distance
        return in_window | ((k.first < self.first) & (k.first <= q.last)) if self.first else in_window

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        if self.step > 1:
            return super().full_block_mask(q, k, heads)
        in_window = (k.first >= q.last - self.left) & (k.last <= q.first + self.right)
        return in_window | ((k.last < self.first) & (k.last <= q.first)) if self.first else in_window

    def count_pairs(self, length: int, n_heads: int = 1) -> float:
        positions = torch.arange(length)
        n_before = positions.clamp(max=self.left) // self.step
        n_after = (length - 1 - positions).clamp(max=self.right) // self.step
        n_pairs = length + int(n_before.sum()) + int(n_after.sum())
        if self.first:  # initial tokens before the window, or between its dilated keys
            k = torch.arange(min(self.first, length))[:, None]
            in_window = (k >= positions - self.left) & ((positions - k) % self.step == 0)
            n_pairs += int(((k <= positions) & ~in_window).sum())
        return n_pairs


@PATTERNS.register("window")
def window(config: ModelConfig, causal: bool) -> Window:
    """Make a window: `width` tokens up to the query in decoders, half of `width` on each side in encoders."""
    options = require_variant(config.attention.pattern, WindowPatternConfig, "model.attention.pattern")
    if causal:
        return Window((options.width - 1) * options.dilation, 0, options.dilation, options.initial_tokens)
    if options.initial_tokens:
        raise UsageError(
            f"model.attention.pattern.initial_tokens = {options.initial_tokens}: in an encoder, initial "
            "tokens would not see the whole document: leave it out, or choose a pattern with global tokens"
        )
    side = options.width // 2 * options.dilation
    return Window(side, side, options.dilation)


@dataclass(frozen=True)
class Chunked(AttentionPattern):
    """Chunked attention: a query sees the keys of its chunk of `size` tokens; causal: no later ones."""

    size: int
    causal: bool

    @property
    def band(self) -> BandLimits:
        return BandLimits(None, 0 if self.causal else None, self.size)

    @property
    def cache_window(self) -> int | None:
        return self.size - 1 if self.causal else None

    def key_ranges(self, first: int, last: int, length: int) -> Ranges:
        end = last if self.causal else -(-last // self.size) * self.size
        return ((first // self.size * self.size, end),)

    def simplify(self, length: int) -> AttentionPattern:
        return Full(self.causal) if self.size >= length else self

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        is_same_block = q // self.size == k // self.size
        return is_same_block & (k <= q) if self.causal else is_same_block

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        may_share_block = (k.last // self.size >= q.first // self.size) & (k.first // self.size <= q.last // self.size)
        return may_share_block & (k.first <= q.last) if self.causal else may_share_block

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        is_same_block = _in_same_chunk(q, k, self.size)
        return is_same_block & (k.last <= q.first) if self.causal else is_same_block

    def count_pairs(self, length: int, n_heads: int = 1) -> float:
        def count_pairs(tokens: int) -> float:
            return tokens * (tokens + 1) / 2 if self.causal else tokens * tokens

        return length // self.size * count_pairs(self.size) + count_pairs(length % self.size)


def _in_same_chunk(q: BlockBounds, k: BlockBounds, size: int) -> Tensor:
    """Return whether both blocks lie in the same chunk of `size` tokens."""
    chunk = q.first // size
    return (q.last // size == chunk) & (k.first // size == chunk) & (k.last // size == chunk)


@PATTERNS.register("chunked")
def chunked(config: ModelConfig, causal: bool) -> Chunked:
    """Make chunked attention; chunks begin at the start of each document."""
    options = require_variant(config.attention.pattern, ChunkedPatternConfig, "model.attention.pattern")
    return Chunked(options.size, causal)


class _CausalByOption(AttentionPattern):
    """Base of patterns with an option `causal`."""

    causal: bool

    @property
    def has_uneven_work(self) -> bool:
        return self.causal

    @property
    def sees_later(self) -> bool:
        return not self.causal


@dataclass(frozen=True)
class Strided(_CausalByOption):
    """Sparse Transformer's strided pattern (Child et al. 2019): keys less than `stride` or a multiple of it away.

    causal: no later keys.
    """

    stride: int
    causal: bool

    @property
    def is_relative(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        distance = q - k
        is_visible = (distance.abs() < self.stride) | (distance % self.stride == 0)
        return is_visible & (distance >= 0) if self.causal else is_visible

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        # Is there a multiple of the stride between the distances of the nearest and the farthest pair?
        min_distance, max_distance = q.first - k.last, q.last - k.first
        may_see = (max_distance // self.stride * self.stride >= min_distance) | (
            (min_distance < self.stride) & (max_distance > -self.stride)
        )
        return may_see & (max_distance >= 0) if self.causal else may_see

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        min_distance, max_distance = q.first - k.last, q.last - k.first
        return (max_distance < self.stride) & (min_distance >= 0 if self.causal else min_distance > -self.stride)


@PATTERNS.register("strided")
def strided(config: ModelConfig, causal: bool) -> Strided:
    """Make both of the paper's heads in one, its "merged" form."""
    options = require_variant(config.attention.pattern, StridedPatternConfig, "model.attention.pattern")
    return Strided(options.stride, causal)


@dataclass(frozen=True)
class Fixed(_CausalByOption):
    """Sparse Transformer's fixed pattern (Child et al. 2019): keys of the query's chunk of `stride` tokens.

    Queries also see the last `summary` keys of every chunk. causal: no later keys.
    """

    stride: int
    summary: int
    causal: bool

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        is_visible = (q // self.stride == k // self.stride) | (k % self.stride >= self.stride - self.summary)
        return is_visible & (k <= q) if self.causal else is_visible

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        first, last = k.first // self.stride, k.last // self.stride
        ends = (last > first) | (k.last % self.stride >= self.stride - self.summary)
        may_see = ends | ((last >= q.first // self.stride) & (first <= q.last // self.stride))
        return may_see & (k.first <= q.last) if self.causal else may_see

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        is_full = _in_same_chunk(q, k, self.stride)
        return is_full & (k.last <= q.first) if self.causal else is_full


@PATTERNS.register("fixed")
def fixed(config: ModelConfig, causal: bool) -> Fixed:
    """Make both of the paper's heads in one, its "merged" form."""
    options = require_variant(config.attention.pattern, FixedPatternConfig, "model.attention.pattern")
    if options.n_summary_tokens >= options.stride:
        raise UsageError(
            f"model.attention.pattern.n_summary_tokens = {options.n_summary_tokens} with stride = "
            f"{options.stride} is full attention: choose fewer, or pattern = 'full'"
        )
    return Fixed(options.stride, options.n_summary_tokens, causal)


@dataclass(frozen=True)
class Longformer(AttentionPattern):
    """Keys up to `side` tokens away, and global tokens at the positions `tokens`, which see all and are seen by all."""

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
        is_visible = (q - k).abs() <= self.side
        for token in self.tokens:
            is_visible = is_visible | (q == token) | (k == token)
        return is_visible

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        may_see = (k.last >= q.first - self.side) & (k.first <= q.last + self.side)
        for token in self.tokens:
            for x in (q, k):
                may_see = may_see | ((x.first <= token) & (token <= x.last))
        return may_see

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (k.first >= q.last - self.side) & (k.last <= q.first + self.side)


@PATTERNS.register("longformer")
def longformer(config: ModelConfig, causal: bool) -> Longformer:
    """Make Longformer's pattern. Raises UsageError in decoders, where global tokens would leak later tokens."""
    options = require_variant(config.attention.pattern, LongformerPatternConfig, "model.attention.pattern")
    if causal:
        raise UsageError(
            "model.attention.pattern.name = 'longformer' has global tokens, which see later tokens: a decoder "
            "can't use it: choose family = 'encoder', or pattern = 'window' with initial_tokens"
        )
    limit = config.position.limit
    if options.global_tokens and limit is not None and max(options.global_tokens) >= limit:
        raise UsageError(
            f"model.attention.pattern.global_tokens contains {max(options.global_tokens)}, but model.position has "
            f"{limit} positions: choose positions below {limit}"
        )
    return Longformer(options.width // 2, options.global_tokens)
