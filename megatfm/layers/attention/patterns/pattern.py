"""Base class of attention patterns. A pattern defines `mask_mod`; masks, block tables and costs follow from it."""

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

DEFAULT_BLOCK = 64
"""Block size for counting pairs, for patterns without a `block_size`."""
BLOCKS_AT_ONCE = 512
"""Partly visible blocks whose pairs are evaluated together."""
MAX_CACHED_COUNTS = 1024
"""Cached pair counts, by pattern, row length and heads; more than the layers of a model need."""


@dataclass(frozen=True)
class BlockBounds:
    """The first and last position in each block, int64, broadcastable to [B or 1, 1, Q, J].

    shortest, longest: lengths of the shortest and longest document in the block, for patterns that depend on them.
    """

    first: Tensor
    last: Tensor
    shortest: Tensor
    longest: Tensor


@dataclass(frozen=True)
class AttentionPattern:
    """Pattern of the tokens of its document that a query sees.

    The fields are the options; equal patterns share cached masks. A new pattern defines `mask_mod`. A sparse one also
    defines `block_mask`, so that kernels skip invisible blocks. Under any pattern, all tokens of a document see its
    prefix.
    """

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        """The equivalent built-in mask of kernels, if there is one."""
        return None

    @property
    def has_uneven_work(self) -> bool:
        """Whether later queries see more keys than earlier ones, so that context parallelism must balance the load."""
        return self.builtin_mask == "causal"

    @property
    def sees_later(self) -> bool:
        """Whether a query may see later keys, prefix tokens excepted."""
        return self.builtin_mask != "causal"

    @property
    def window(self) -> tuple[int, int] | None:
        """Number of visible tokens before and after the query (−1: all), if the pattern is a plain window."""
        return None

    @property
    def is_relative(self) -> bool:
        """Whether visibility depends on key − query only, so that positions in rows serve as well as in documents."""
        return False

    @property
    def block_size(self) -> int | None:
        """Block size of a pattern made of blocks, which kernels then use too; None for other patterns."""
        return None

    @property
    def differs_by_head(self) -> bool:
        """Whether heads see different tokens."""
        return False

    @property
    def depends_on_length(self) -> bool:
        """Whether visibility depends on the document's length; such patterns define `mask_mod_for_lengths`."""
        return False

    @property
    def band(self) -> BandLimits | None:
        """The equivalent band, if there is one; kernels then need no block table."""
        return None

    @property
    def is_cross_attention(self) -> bool:
        """Whether keys are the encoder's tokens, not those of the query's row."""
        return False

    @property
    def cache_window(self) -> int | None:
        """Number of most recent tokens that a key-value cache keeps for the next token; None: all."""
        return None

    @property
    def n_initial_kept(self) -> int:
        """Number of each document's first tokens that a cache keeps besides `cache_window`."""
        return 0

    def key_ranges(self, first: int, last: int, length: int) -> Ranges | None:
        """Return ranges (begin, end) of keys that queries `first` to `last` − 1 of a document may see.

        Ranges may extend beyond the document's `length` tokens. None: no bound but causality (`sees_later`). Global
        queries are not included.
        """
        return None

    def global_queries(self, length: int) -> Ranges:
        """Return ranges (begin, end) of the few queries that see all of a document of `length` tokens."""
        return ()

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        """Return whether the query at position q of a document sees the key at position k, [B or 1, n or 1, T, S].

        q, k: int64, broadcastable to that shape, from 0. heads: int64 [1, n, 1, 1], head indices.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks mask_mod(q, k, heads)")

    def mask_mod_for_lengths(self, q: Tensor, k: Tensor, heads: Tensor, lengths: Tensor) -> Tensor:
        """Compute `mask_mod` in documents of these lengths (int64, broadcastable)."""
        return self.mask_mod(q, k, heads)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        """Return whether a query block may see any key of a key block, [B or 1, n or 1, Q, J].

        May return true for invisible blocks, never false for visible ones.
        """
        return (q.first <= q.last) & (k.first <= k.last)

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        """Return whether all queries of a block see all keys of a block, [B or 1, n or 1, Q, J].

        May return false for full blocks, never true for others.
        """
        return (q.first > q.last) & (k.first > k.last)

    def simplify(self, length: int) -> "AttentionPattern":
        """Return an equivalent simpler pattern for rows of up to `length` tokens, if there is one."""
        return self

    def at_depth(self, depth: int) -> Self:
        """Return the pattern of the layer at `depth`; it differs for patterns with random blocks or shifts by layer."""
        return self

    def count_pairs(self, length: int, n_heads: int = 1) -> float:
        """Count visible query-key pairs in a document of `length` tokens, averaged over heads."""
        n_heads = n_heads if self.differs_by_head else 1
        size, lengths = self.block_size or DEFAULT_BLOCK, torch.tensor(length)
        starts, within = torch.arange(0, length, size), torch.arange(size)
        heads = _make_head_index(0, n_heads, lengths.device)
        ends = (starts + size).clamp(max=length) - 1
        bounds_k, n_pairs = BlockBounds(starts, ends, lengths, lengths), 0
        for first, last in zip(starts.split(DEFAULT_BLOCK), ends.split(DEFAULT_BLOCK), strict=True):
            bounds_q = BlockBounds(first[:, None], last[:, None], lengths, lengths)
            shape = 1, n_heads, len(first), len(starts)
            partly_visible = self.block_mask(bounds_q, bounds_k, heads).expand(shape)
            fully_visible = partly_visible & self.full_block_mask(bounds_q, bounds_k, heads).expand(shape)
            n_pairs += int((fully_visible * (last - first + 1)[:, None] * (ends - starts + 1)).sum())
            partly = (partly_visible & ~fully_visible).nonzero()[:, 1:, None, None]
            for chunk in partly.split(BLOCKS_AT_ONCE) if len(partly) else ():
                head, q, k = chunk.unbind(1)
                q_positions, k_positions = first[q] + within[:, None], starts[k] + within
                is_visible = self.mask_mod_for_lengths(q_positions, k_positions, head, lengths)
                n_pairs += int((is_visible & (q_positions < length) & (k_positions < length)).sum())
        return n_pairs / n_heads

    def cost(self, tokens: TokenCounts, channels: float, n_heads: int = 1) -> Cost:
        """Return the cost of the scores and of the weighted sums of values. channels: query plus value channels, all
        heads.

        Sparse patterns count their visible pairs (`count_pairs`). Built-in masks count all pairs as computed and, if
        causal, half as visible, as is the convention.
        """
        if self.builtin_mask is None:
            pairs = n_visible = _count_pairs_once(self, round(tokens.n), n_heads)
        else:
            pairs = tokens.n * (tokens.encoder_tokens if self.is_cross_attention else tokens.n)
            n_visible = pairs / 2 if self.builtin_mask == "causal" else pairs
        return Cost(attention_macs=channels * pairs, visible_attention_macs=channels * n_visible)

    def is_builtin(self, sequence: SequenceMetadata) -> bool:
        """Return whether `builtin_mask` is the exact mask of this sequence."""
        is_one_document = sequence.document_ids(of_memory=self.is_cross_attention) is None
        is_causal = self.builtin_mask == "causal" and sequence.has_plain_rows
        return is_one_document and (self.builtin_mask == "all" or is_causal)

    def mask(
        self, sequence: SequenceMetadata, first_head: int = 0, n_heads: int = 1, queries: slice = ALL_QUERIES
    ) -> Tensor | None:
        """Return the boolean mask [B or 1, n or 1, T, S], true where visible; None where `builtin_mask` is exact.

        `sequence.mask(pattern)` caches it for all layers. queries: a slice, by default all.
        """
        if self.is_builtin(sequence):
            return None
        in_document_B1TS = sequence.same_document(of_memory=self.is_cross_attention, queries=queries)
        if self.builtin_mask == "all":
            return in_document_B1TS
        q, k = self.positions(sequence)
        heads, lengths = _make_head_index(first_head, n_heads, q.device), self.lengths(sequence)
        lengths = (lengths[:, queries] if lengths.shape[1] > 1 else lengths)[:, None, :, None]
        is_visible = self.mask_mod_for_lengths(q[:, None, queries, None], k[:, None, None, :], heads, lengths)
        if sequence.prefix_mask is not None:
            is_visible = is_visible | sequence.prefix_mask[:, None, None, :]
        return is_visible if in_document_B1TS is None else in_document_B1TS & is_visible

    def make_block_table(
        self, sequence: SequenceMetadata, size: int, first_head: int = 0, n_heads: int = 1, *, full: bool = False
    ) -> Tensor:
        """Return a boolean table [B or 1, n or 1, Q, J] of blocks of `size` tokens, true where blocks may see keys.

        full: true only where all queries of a block see all keys of the other.
        """
        q, k = self.positions(sequence)
        lengths, heads = self.lengths(sequence), _make_head_index(first_head, n_heads, q.device)
        bounds_q, bounds_k = compute_block_bounds(q, size, -1, lengths), compute_block_bounds(k, size, -2)
        block_mask = (self.full_block_mask if full else self.block_mask)(bounds_q, bounds_k, heads)
        if sequence.prefix_mask is not None:
            prefix_bounds = compute_block_bounds(sequence.prefix_mask.long(), size, -2)
            block_mask = block_mask | (prefix_bounds.first if full else prefix_bounds.last).bool()
        documents = sequence.document_ids(of_memory=self.is_cross_attention)
        if documents is None:
            return block_mask
        return block_mask & (is_one_document if full else shares_document)(*documents, size)

    def lengths(self, sequence: SequenceMetadata) -> Tensor:
        """Return the lengths of the queries' documents [B or 1, T or 1]; row lengths where the pattern ignores them."""
        if not self.depends_on_length or sequence.document_ids() is None:
            return torch.full((1, 1), sequence.length, device=sequence.indices.device)
        return sequence.document_lengths()

    def positions(self, sequence: SequenceMetadata) -> tuple[Tensor, Tensor]:
        """Return positions of queries [B or 1, T] and keys [B or 1, S]: in the row if equivalent, else in documents."""
        if self.is_cross_attention and sequence.memory is not None:
            return sequence.indices[None], sequence.memory.key_indices[None]
        if self.is_relative or sequence.document_ids() is None:
            return sequence.indices[None], sequence.key_indices[None]
        return sequence.positions_in_document()


@lru_cache(MAX_CACHED_COUNTS)
def _count_pairs_once(pattern: AttentionPattern, length: int, n_heads: int) -> float:
    """Count pairs once for all layers; counting may evaluate every pair."""
    return pattern.count_pairs(length, n_heads)


def _make_head_index(first: int, n: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + n, device=device)[None, :, None, None]


def compute_block_bounds(values: Tensor, size: int, dim: int, lengths: Tensor | None = None) -> BlockBounds:
    """Return the smallest and largest value of each block of `values` [B or 1, L], with a new dim at `dim`."""
    tensors = [values] if lengths is None else [values, lengths.expand(len(lengths), values.shape[1])]
    bounds: list[Tensor] = []
    for x in tensors:
        n_padding = -x.shape[1] % size
        blocks = torch.cat([x, x[:, -1:].expand(-1, n_padding)], 1).unflatten(1, (-1, size))
        bounds += [blocks.amin(-1)[:, None].unsqueeze(dim), blocks.amax(-1)[:, None].unsqueeze(dim)]
    return BlockBounds(*bounds[:2], *bounds[-2:])


def shares_document(documents_q: Tensor, documents_k: Tensor, size: int) -> Tensor:
    """Return whether blocks of queries and of keys may share a document, [B or 1, 1, Q, J].

    documents_q, documents_k: document ids [B or 1, T] and [B or 1, S], ascending in a row.
    """
    q, k = compute_block_bounds(documents_q, size, -1), compute_block_bounds(documents_k, size, -2)
    return (k.first <= q.last) & (k.last >= q.first)


def is_one_document(documents_q: Tensor, documents_k: Tensor, size: int) -> Tensor:
    """Return whether a block of queries and one of keys lie in the same document, [B or 1, 1, Q, J]."""
    q, k = compute_block_bounds(documents_q, size, -1), compute_block_bounds(documents_k, size, -2)
    return (q.first == q.last) & (k.first == k.last) & (q.first == k.first)


PATTERNS: Registry[Callable[[ModelConfig, bool], AttentionPattern]] = Registry("attention pattern")
"""Attention patterns by name, made as `PATTERNS.get(name)(config, causal)`. causal: queries see no later tokens."""
