"""The base of attention patterns: from `mask_mod` alone follow masks, tables of blocks, costs and sizes of caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts
from megatfm.layers.sequence import ALL_QUERIES, SequenceMetadata
from megatfm.ops.attention.mask import BandLimits, BuiltinMask
from megatfm.registry import Registry

# B batch, T queries, S keys, n heads that differ (or 1), Q and J blocks of queries and of keys

Ranges = Sequence[tuple[int, int]]

BLOCK = 64
"""Tokens of a block in which pairs are counted, unless a pattern has a grain."""
COUNTED = 512
"""Number of partly visible blocks whose pairs are examined together."""
PAIRS_CACHED = 1024
"""Counts of pairs that are remembered, by pattern, row length and heads: more than a model's layers need."""


@dataclass(frozen=True)
class BlockBounds:
    """The first and the last place of each block, int64 that broadcast to [B or 1, 1, Q, J].

    shortest, longest: of the documents that its tokens belong to, for patterns of a length.
    """

    first: Tensor
    last: Tensor
    shortest: Tensor
    longest: Tensor


@dataclass(frozen=True)
class AttentionPattern:
    """The tokens of its document that a query sees. Frozen: its fields are its options, and equal ones share a mask.

    A new pattern defines `mask_mod`; one that leaves full blocks out defines `block_mask` too, so that kernels skip
    those. Tokens of a prefix are seen by all of their document under any pattern.
    """

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        """The kernels' name for it, if there is one."""
        return None

    @property
    def has_uneven_work(self) -> bool:
        """Whether later queries see more than earlier ones, so that parts of a row are unequal work."""
        return self.builtin_mask == "causal"

    @property
    def sees_later(self) -> bool:
        """Whether a query may see later keys, apart from tokens of a prefix."""
        return self.builtin_mask != "causal"

    @property
    def window(self) -> tuple[int, int] | None:
        """Tokens before and after itself that a query sees, −1: all; None: no window says it all."""
        return None

    @property
    def is_relative(self) -> bool:
        """Whether key − query says it all: then places may be counted from anywhere."""
        return False

    @property
    def block_size(self) -> int | None:
        """Tokens of the blocks that it is made of, where it is: kernels then look at blocks of this size."""
        return None

    @property
    def differs_by_head(self) -> bool:
        """Whether heads see different tokens."""
        return False

    @property
    def depends_on_length(self) -> bool:
        """Whether it depends on the document's length: `mask_mod_for_lengths` then takes the place of `mask_mod`."""
        return False

    @property
    def band(self) -> BandLimits | None:
        """Limits of a band that says all of the pattern, if one does: kernels then need no table of blocks."""
        return None

    @property
    def is_cross_attention(self) -> bool:
        """Whether keys are a memory's tokens and not those of the queries' own row."""
        return False

    @property
    def cache_window(self) -> int | None:
        """Number of tokens before a new one whose keys and values a cache keeps; None: all."""
        return None

    @property
    def n_initial_kept(self) -> int:
        """And of how many of its document's first tokens."""
        return 0

    def key_ranges(self, first: int, last: int, length: int) -> Ranges | None:
        """The keys that queries from place `first` up to `last`, not with it, may see in a document of `length` tokens:
        runs (begin, end), which may lie beyond its ends; None: they may be anywhere in it, or before `last` where no
        later keys are seen (`sees_later`). `global_queries` are left out."""
        return None

    def global_queries(self, length: int) -> Ranges:
        """The few queries of a document of `length` tokens that may see all of it: runs (begin, end)."""
        return ()

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        """Whether the query at place q of a document sees the key at its place k; boolean [B or 1, n or 1, T, S].

        int64 that broadcast to that; heads [1, n, 1, 1]: their numbers. Places count from 0.
        """
        raise NotImplementedError

    def mask_mod_for_lengths(self, q: Tensor, k: Tensor, heads: Tensor, lengths: Tensor) -> Tensor:
        """Compute `mask_mod` in documents of these lengths (int64, broadcastable)."""
        return self.mask_mod(q, k, heads)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        """Whether any query of one block may see any key of another, [B or 1, n or 1, Q, J]; may have false
        positives."""
        return (q.first <= q.last) & (k.first <= k.last)

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        """Whether all queries of one block see all keys of another, as `block_mask`; may have false negatives."""
        return (q.first > q.last) & (k.first > k.last)

    def simplify(self, length: int) -> "AttentionPattern":
        """Return an equivalent simpler pattern for rows of up to `length` tokens, if there is one."""
        return self

    def at_depth(self, depth: int) -> Self:
        """Return the pattern of one layer: another one, if layers draw random blocks of their own."""
        return self

    def pairs(self, length: int, n_heads: int = 1) -> float:
        """Pairs of query and key that are seen in a document of `length` tokens, on average over the heads."""
        n_heads = n_heads if self.differs_by_head else 1
        size, lengths = self.block_size or BLOCK, torch.tensor(length)
        starts, within, heads = (
            torch.arange(0, length, size),
            torch.arange(size),
            _heads(0, n_heads, lengths.device),
        )
        ends = (starts + size).clamp(max=length) - 1
        bounds_k, n_pairs = BlockBounds(starts, ends, lengths, lengths), 0
        for first, last in zip(starts.split(BLOCK), ends.split(BLOCK), strict=True):
            bounds_q, shape = (
                BlockBounds(first[:, None], last[:, None], lengths, lengths),
                (1, n_heads, len(first), len(starts)),
            )
            partly_visible = self.block_mask(bounds_q, bounds_k, heads).expand(shape)
            fully_visible = partly_visible & self.full_block_mask(bounds_q, bounds_k, heads).expand(shape)
            n_pairs += int((fully_visible * (last - first + 1)[:, None] * (ends - starts + 1)).sum())
            partly = (partly_visible & ~fully_visible).nonzero()[:, 1:, None, None]
            for part in partly.split(COUNTED) if len(partly) else ():
                head, q, k = part.unbind(1)
                at_q, at_k = first[q] + within[:, None], starts[k] + within
                is_visible = self.mask_mod_for_lengths(at_q, at_k, head, lengths)
                n_pairs += int((is_visible & (at_q < length) & (at_k < length)).sum())
        return n_pairs / n_heads

    def cost(self, tokens: TokenCounts, channels: float, n_heads: int = 1) -> Cost:
        """Cost of the scores and of the sums of values. channels: of both, over all heads.

        It follows from `pairs`; but of attention that kernels have a word for, all pairs count, and of causal ones half
        of them are seen, as is usual.
        """
        if self.builtin_mask is None:
            pairs = n_visible = _pairs(self, round(tokens.n), n_heads)
        else:
            pairs = tokens.n * (tokens.encoder_tokens if self.is_cross_attention else tokens.n)
            n_visible = pairs / 2 if self.builtin_mask == "causal" else pairs
        return Cost(attention_macs=channels * pairs, visible_attention_macs=channels * n_visible)

    def is_builtin(self, sequence: SequenceMetadata) -> bool:
        """Whether `plain` says all of it for a sequence."""
        alone = sequence.document_ids(of_memory=self.is_cross_attention) is None
        return alone and (
            self.builtin_mask == "all"
            or (
                self.builtin_mask == "causal"
                and sequence.is_full_sequence
                and sequence.prefix_mask is None
                and not sequence.cached_length
            )
        )

    def mask(
        self, sequence: SequenceMetadata, first_head: int = 0, n_heads: int = 1, rows: slice = ALL_QUERIES
    ) -> Tensor | None:
        """Boolean [B or 1, n or 1, T, S], true where a query looks; None where `plain` says the same.

        `sequence.mask(pattern)` makes it once for all layers. rows: of some of the queries alone.
        """
        if self.is_builtin(sequence):
            return None
        same_B1TS = sequence.same_document(of_memory=self.is_cross_attention, rows=rows)
        if self.builtin_mask == "all":
            return same_B1TS
        q, k = self.places(sequence)
        heads, lengths = _heads(first_head, n_heads, q.device), self.lengths(sequence)
        lengths = (lengths[:, rows] if lengths.shape[1] > 1 else lengths)[:, None, :, None]
        is_visible = self.mask_mod_for_lengths(q[:, None, rows, None], k[:, None, None, :], heads, lengths)
        if sequence.prefix_mask is not None:
            is_visible = is_visible | sequence.prefix_mask[:, None, None, :]
        return is_visible if same_B1TS is None else same_B1TS & is_visible

    def block_table(
        self,
        sequence: SequenceMetadata,
        size: int,
        first_head: int = 0,
        n_heads: int = 1,
        *,
        full: bool = False,
    ) -> Tensor:
        """Boolean [B or 1, n or 1, Q, J], true where a query of a block of `size` tokens may see a key of a block.

        full: true where all of its queries surely see all keys of a block.
        """
        q, k = self.places(sequence)
        lengths, heads = self.lengths(sequence), _heads(first_head, n_heads, q.device)
        bounds_q, bounds_k = block_bounds(q, size, -1, lengths), block_bounds(k, size, -2)
        block_mask = (
            self.full_block_mask(bounds_q, bounds_k, heads)
            if full
            else self.block_mask(bounds_q, bounds_k, heads)
        )
        if sequence.prefix_mask is not None:
            prefix_bounds = block_bounds(sequence.prefix_mask.long(), size, -2)
            block_mask = block_mask | (prefix_bounds.first if full else prefix_bounds.last).bool()
        numbers = sequence.document_ids(of_memory=self.is_cross_attention)
        if numbers is None:
            return block_mask
        bounds_q, bounds_k = block_bounds(numbers[0], size, -1), block_bounds(numbers[1], size, -2)
        if full:
            return (
                block_mask
                & (bounds_q.first == bounds_q.last)
                & (bounds_k.first == bounds_k.last)
                & (bounds_q.first == bounds_k.first)
            )
        return block_mask & (bounds_k.first <= bounds_q.last) & (bounds_k.last >= bounds_q.first)

    def lengths(self, sequence: SequenceMetadata) -> Tensor:
        """Lengths of the queries' documents [B or 1, T or 1]; any number where they make no difference."""
        if not self.depends_on_length or sequence.document_ids() is None:
            return torch.full((1, 1), sequence.length, device=sequence.indices.device)
        return sequence.document_lengths()

    def places(self, sequence: SequenceMetadata) -> tuple[Tensor, Tensor]:
        """Positions of queries [B or 1, T] and keys [B or 1, S]: in the row if that is the same, else the document."""
        if self.is_cross_attention and sequence.memory is not None:
            return sequence.indices[None], sequence.memory.key_indices[None]
        if self.is_relative or sequence.document_ids() is None:
            return sequence.indices[None], sequence.key_indices[None]
        return sequence.positions_in_document()


@lru_cache(PAIRS_CACHED)
def _pairs(pattern: AttentionPattern, length: int, n_heads: int) -> float:
    """`pairs`, which may look at each of them, once for all layers."""
    return pattern.pairs(length, n_heads)


def _heads(first: int, n: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + n, device=device)[None, :, None, None]


def block_bounds(values: Tensor, size: int, dim: int, lengths: Tensor | None = None) -> BlockBounds:
    """The least and the greatest value [B or 1, L] of each block, with the other side's dim beside it."""
    first, last = _bounds(values, size, dim)
    if lengths is None:
        return BlockBounds(first, last, first, last)
    return BlockBounds(first, last, *_bounds(lengths.expand(len(lengths), values.shape[1]), size, dim))


def _bounds(values: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    missing = -values.shape[1] % size
    blocks = torch.cat([values, values[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size))
    return blocks.amin(-1)[:, None].unsqueeze(dim), blocks.amax(-1)[:, None].unsqueeze(dim)


PATTERNS: Registry[Callable[[ModelConfig, bool], AttentionPattern]] = Registry("attention pattern")
"""Made as `PATTERNS.get(name)(config, causal)`; causal: in a decoder, whose queries must not see later tokens."""
