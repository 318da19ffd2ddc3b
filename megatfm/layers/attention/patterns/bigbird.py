"""BigBird (Zaheer et al. 2020): neighbouring, global and random blocks of keys."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatfm.config import BigBirdPatternConfig, ModelConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import PATTERNS, AttentionPattern, BlockBounds, Ranges
from megatfm.ops.torch_private import constant_when_compiled
from megatfm.ops.transfer import move_to_device

MAX_CACHED_TABLES = 2**10
"""Cached tables of random blocks, one for each layer and length."""

MAX_BLOCKS_CHECKED = 9
"""Kernel blocks that overlap more pattern blocks than this count as seeing all keys."""


@dataclass(frozen=True)
class BigBird(AttentionPattern):
    """Queries see their own and both neighbouring blocks, `n_random` random blocks, and the first and last block.

    Queries of the first and last block see all keys. extra: this many first tokens are global instead of those blocks
    (the paper's ETC). Documents of at most 5 + 2 n_random blocks have full attention, as in the released code. causal
    (not in the paper): no later keys, no global last block, no exception for short documents. layer: seed of the
    random blocks. rows, random_table: number of query blocks and their random key blocks; rows = 0: drawn on demand.
    """

    block: int
    n_random: int
    extra: int
    n_heads: int
    causal: bool = False
    layer: int = 0
    rows: int = 0
    random_table: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def differs_by_head(self) -> bool:
        return self.n_random > 0

    @property
    def block_size(self) -> int | None:
        return self.block

    @property
    def depends_on_length(self) -> bool:
        return not self.causal

    def key_ranges(self, first: int, last: int, length: int) -> Ranges:
        size, end = self.block, -(-length // self.block) * self.block
        neighbours = (first // size - 1) * size, (-(-last // size) + 1) * size
        first_blocks = 0, max(self.extra or size, size * self._full_below_blocks if self.n_random else 0)
        if self.causal:
            return (neighbours[0], last), (0, min(last, first_blocks[1]))
        if length <= self._full_below_blocks * size:
            return ((0, length),)
        return (neighbours, first_blocks) if self.extra else (neighbours, first_blocks, (end - size, end))

    def global_queries(self, length: int) -> Ranges:
        size, end = self.block, -(-length // self.block) * self.block
        if self.causal or length <= self._full_below_blocks * size:
            return ()
        return ((0, self.extra),) if self.extra else ((0, size), (end - size, length))

    def simplify(self, length: int) -> Self:
        rows = -(-length // self.block)
        if not self.n_random or rows == self.rows:
            return self
        return replace(self, rows=rows, random_table=draw_random_blocks(rows, self.n_heads, self.n_random, self.layer))

    def at_depth(self, depth: int) -> Self:
        return replace(self, layer=depth)

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return self.mask_mod_for_lengths(q, k, heads, q.max() + 1)

    def mask_mod_for_lengths(self, q: Tensor, k: Tensor, heads: Tensor, lengths: Tensor) -> Tensor:
        is_visible = self._is_block_visible(q // self.block, k // self.block, heads, lengths)
        if self.extra:
            is_visible = is_visible | (q < self.extra) | (k < self.extra)
        return is_visible & (k <= q) if self.causal else is_visible

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        (q0, q1), (k0, k1) = ((x.first // self.block, x.last // self.block) for x in (q, k))
        may_see = (k1 >= q0 - 1) & (k0 <= q1 + 1)
        # A block of a kernel that lies in many blocks of the pattern, or in documents of several lengths, may see all.
        may_see = may_see | (q1 - q0 >= MAX_BLOCKS_CHECKED) | (q.shortest != q.longest)
        if self.extra:
            may_see = may_see | (q.first < self.extra) | (k.first < self.extra)
        else:
            may_see = may_see | (k0 == 0)
        count = -(-q.shortest // self.block)
        if not (self.causal or self.extra):
            may_see = may_see | (q0 == 0) | (q1 >= count - 1) | (k1 >= count - 1)
        if not self.causal:
            may_see = may_see | (count <= self._full_below_blocks)
        for step in range(min(MAX_BLOCKS_CHECKED, int((q1 - q0).max()) + 1)):
            for random_block in self._draw_random_blocks(torch.minimum(q0 + step, q1), heads):
                may_see = may_see | ((k0 <= random_block) & (random_block <= k1))
        return may_see & (k.first <= q.last) if self.causal else may_see

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        (q0, q1), (k0, k1) = ((x.first // self.block, x.last // self.block) for x in (q, k))
        is_full = self._is_block_visible(q0, k0, heads, q.longest)
        is_full = is_full & (q0 == q1) & (k0 == k1) & (q.shortest == q.longest)
        return is_full & (k.last <= q.first) if self.causal else is_full

    @property
    def _full_below_blocks(self) -> int:
        """Documents of up to this many blocks have full attention."""
        return 5 + 2 * self.n_random

    def _is_block_visible(self, q: Tensor, k: Tensor, heads: Tensor, lengths: Tensor) -> Tensor:
        """Return whether query blocks q see key blocks k (block indices) in documents of these lengths."""
        is_visible, count = (q - k).abs() <= 1, -(-lengths // self.block)
        if not self.extra:
            is_visible = is_visible | (k == 0)
        if not (self.causal or self.extra):
            is_visible = is_visible | (q == 0) | (q == count - 1) | (k == count - 1)
        for random_block in self._draw_random_blocks(q, heads):
            is_visible = is_visible | (k == random_block)
        return is_visible if self.causal else is_visible | (count <= self._full_below_blocks)

    def _draw_random_blocks(self, q: Tensor, heads: Tensor) -> tuple[Tensor, ...]:
        """Return the random key blocks of query blocks q, one tensor for each of `n_random`."""
        if not self.n_random:
            return ()
        table = self.random_table
        if table is None:
            table = draw_random_blocks(int(q.max()) + 1, self.n_heads, self.n_random, self.layer)
        return move_to_device(table, q.device)[heads, q].unbind(-1)


@constant_when_compiled
def draw_random_blocks(rows: int, n_heads: int, n_random: int, seed: int) -> Tensor:
    """Draw the random key blocks of each query block, int64 [heads, rows, n_random], as transformers does.

    Candidates are the first 5 + 2 n_random blocks, except the first and last of these and the neighbours of the query
    block. The first query block has −1. Blocks are drawn in order, so that longer rows keep the draws of shorter ones.
    """
    return _draw(rows, n_heads, n_random, seed)


@lru_cache(MAX_CACHED_TABLES)
def _draw(rows: int, n_heads: int, n_random: int, seed: int) -> Tensor:
    generator, n_candidates = np.random.RandomState(seed), 5 + 2 * n_random
    table = np.full((n_heads, rows, n_random), -1)
    for row in range(1, rows):
        excluded = {row - 1, row, row + 1, 0, n_candidates - 1}
        excluded |= {n_candidates - 2} if row == 1 else {1} if row == n_candidates - 2 else set()
        for head in range(n_heads):
            random_blocks = [block for block in generator.permutation(n_candidates) if block not in excluded]
            table[head, row] = random_blocks[:n_random]
    with _disable_current_modes():  # a fake tensor would be kept for real passes
        return torch.from_numpy(table)


@PATTERNS.register("bigbird")
def bigbird(config: ModelConfig, causal: bool) -> BigBird:
    """Make the paper's ITC (global blocks), or with `n_global_tokens` its ETC (global first tokens)."""
    options = require_variant(config.attention.pattern, BigBirdPatternConfig, "model.attention.pattern")
    if options.n_random_blocks > 64:
        raise UsageError(
            f"model.attention.pattern.n_random_blocks = {options.n_random_blocks}: more than 64 random blocks "
            "are no sparse pattern: choose fewer (the paper: 3), or pattern = 'full'"
        )
    return BigBird(
        options.block_size, options.n_random_blocks, options.n_global_tokens, config.attention.n_heads, causal
    )
