"""Masks of a pattern over a sequence in all forms that kernels need, and the keys that given queries can reach."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.attention.patterns.pattern import AttentionPattern, Ranges, compute_block_bounds
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.bands import make_bands, make_shard_bands
from megatfm.ops.attention.mask import Band, BuiltinMask, DocumentSpans

T = TypeVar("T")


class PatternMask:
    """The `AttentionMask` of a pattern over a sequence, for `n_heads` heads from `first_head` on."""

    def __init__(
        self, pattern: AttentionPattern, sequence: SequenceMetadata, first_head: int = 0, n_heads: int = 1
    ) -> None:
        self._pattern, self._sequence = pattern.simplify(sequence.length), sequence
        if self._pattern.builtin_mask == "causal" and _is_last_token(sequence):
            self._pattern = Full(causal=False)
        self._heads = (first_head, n_heads) if pattern.differs_by_head else (0, 1)

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        return self._pattern.builtin_mask if self._pattern.is_builtin(self._sequence) else None

    @property
    def block_size(self) -> int | None:
        return self._pattern.block_size

    @property
    def window(self) -> tuple[int, int] | None:
        sequence = self._sequence
        has_boundaries = sequence.documents is None or sequence.cu_seqlens is not None
        if not (sequence.has_plain_rows and has_boundaries) or self._pattern.is_cross_attention:
            return None
        return self._pattern.window

    def cu_seqlens(self) -> Tensor:
        return self._sequence.uniform_cu_seqlens()

    def mask(self) -> Tensor | None:
        return self._sequence.mask(self._pattern, *self._heads)

    def block_mask(self, size: int) -> Tensor:
        return self._pattern.make_block_table(self._sequence, size, *self._heads)

    def full_block_mask(self, size: int) -> Tensor:
        return self._pattern.make_block_table(self._sequence, size, *self._heads, full=True)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pattern, sequence = self._pattern, self._sequence
        positions_q, positions_k = pattern.positions(sequence)
        row = b if len(positions_q) > 1 else b * 0
        lengths = pattern.lengths(sequence).expand(len(positions_q), positions_q.shape[1])[row, q]
        is_visible = pattern.mask_mod_for_lengths(positions_q[row, q], positions_k[row, k], n + self._heads[0], lengths)
        if sequence.prefix_mask is not None:
            is_visible = is_visible | sequence.prefix_mask[b, k]
        documents = sequence.document_ids(of_memory=pattern.is_cross_attention)
        return is_visible if documents is None else is_visible & (documents[0][b, q] == documents[1][b, k])

    def find_translation_invariant_blocks(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Return the blocks inside one document, for patterns that depend on key − query only; None for other
        patterns."""
        if (
            not (self._pattern.is_relative and self._sequence.is_full_sequence)
            or self._sequence.prefix_mask is not None
        ):
            return None
        documents = self._sequence.document_ids(of_memory=self._pattern.is_cross_attention)
        if documents is None:
            is_visible = self._sequence.indices.new_ones(1, 1).bool()
            q, k = len(self._sequence.indices), len(self._sequence.key_indices)
            return is_visible.expand(1, -(-q // size)), is_visible.expand(1, -(-k // size))
        bounds_q, bounds_k = (compute_block_bounds(ids, size, -1) for ids in documents)
        return (bounds_q.first == bounds_q.last)[:, 0, :, 0], (bounds_k.first == bounds_k.last)[:, 0, :, 0]

    def document_spans(self) -> DocumentSpans | None:
        """Return the documents of full rows, for full attention without a prefix; None otherwise."""
        sequence = self._sequence
        if not sequence.has_plain_rows or not isinstance(self._pattern, Full) or sequence.documents is None:
            return None
        spans = [(row, start, end) for row, start, end in sequence.document_spans() if row is not None]
        return DocumentSpans(spans, self._pattern.causal)

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """Return bands of tiles along each document; None for shards, cached keys, a prefix or a pattern that is no
        band."""
        limits, sequence = self._pattern.band, self._sequence
        if limits is None or not sequence.has_plain_rows or self._pattern.is_cross_attention:
            return None
        return make_bands(limits, sequence.document_spans(), sequence.indices.device, fused=fused)

    def shard_bands(self) -> Sequence[Band] | None:
        """Return the bands of full attention without a prefix, in host memory; None for others."""
        sequence = self._sequence
        if not isinstance(self._pattern, Full) or sequence.cached_length or sequence.prefix_mask is not None:
            return None
        documents = sequence.full_sequence.document_spans()
        return make_shard_bands(documents, sequence.indices, sequence.key_indices, causal=self._pattern.causal)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._sequence.cached((key, self._pattern, self._heads), make)


def _is_last_token(sequence: SequenceMetadata) -> bool:
    """Return whether the only query is the last token of its row, after cached ones: it sees all of them."""
    return bool(sequence.cached_length) and sequence.positions.shape[1] == 1 and sequence.is_full_sequence


def find_reachable_keys(pattern: AttentionPattern, row: SequenceMetadata, query_indices: Tensor) -> Tensor:
    """Return the key indices that queries at `query_indices` see in any row, ascending, with the queries' own.

    row and query_indices: in host memory (`SequenceMetadata.on_host`). Padding keys are not searched, because only
    padding sees them.
    """
    is_needed = np.zeros(row.length, np.bool_)
    in_prefix = None if row.prefix_mask is None else row.prefix_mask.numpy()
    indices = query_indices.numpy()
    is_needed[indices] = True
    for run in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1):
        first, last = int(run[0]), int(run[-1]) + 1
        for row_index, start, end in _split_documents(row, first, last):
            length = end - start
            for begin, stop in _find_key_ranges(pattern, max(first - start, 0), min(last - start, length), length):
                is_needed[start + max(begin, 0) : start + min(stop, length)] = True
            if in_prefix is not None:
                is_needed[start:end] |= in_prefix[row_index % len(in_prefix), start:end]
    return torch.from_numpy(np.flatnonzero(is_needed))


def _find_key_ranges(pattern: AttentionPattern, first: int, last: int, length: int) -> Ranges:
    """Return the ranges of keys that queries `first` to `last` − 1 of a document see; all keys without a bound."""
    ranges = pattern.key_ranges(first, last, length)
    if ranges is not None:
        return ranges
    return ((0, length if pattern.sees_later else last),)


def find_global_queries(pattern: AttentionPattern, row: SequenceMetadata, indices_by_rank: Sequence[Tensor]) -> Tensor:
    """Return the token indices, ascending, of global queries in documents that span several ranks.

    row and indices_by_rank (the token indices of each rank): in host memory.
    """
    is_needed, rank_of = np.zeros(row.length, np.bool_), np.zeros(row.length, np.int64)
    if not pattern.global_queries(row.length):
        return torch.from_numpy(np.flatnonzero(is_needed))
    for rank, indices in enumerate(indices_by_rank):
        rank_of[indices.numpy()] = rank
    spans = [
        span
        for bounds, padding in _get_documents(row)
        for span, is_padding in zip(pairwise(bounds.tolist()), padding, strict=True)
        if not is_padding
    ]
    for start, end in spans:
        if (rank_of[start:end] != rank_of[start]).any():
            for begin, stop in pattern.global_queries(end - start):
                is_needed[start + begin : min(start + stop, end)] = True
    return torch.from_numpy(np.flatnonzero(is_needed))


Documents = list[tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""For each row: boundaries of its documents [C + 1], ascending, and which of them are padding [C]."""


def _get_documents(row: SequenceMetadata) -> Documents:
    return row.cached("bounds of documents", lambda: _find_documents(row))


def _find_documents(row: SequenceMetadata) -> Documents:
    documents = row.document_ids()
    if documents is None:
        return [(np.array([0, row.length]), np.zeros(1, np.bool_))] * len(row.positions)
    boundaries_by_row = []
    for document_ids in documents[0].numpy():
        starts = np.concatenate([[0], np.flatnonzero(np.diff(document_ids)) + 1])
        boundaries_by_row.append((np.append(starts, len(document_ids)), document_ids[starts] < 0))
    return boundaries_by_row


def _split_documents(row: SequenceMetadata, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of documents that lie partly inside tokens `first` to `last` − 1; padding excepted.

    These are at most the first and the last document of the run: those fully inside see no keys outside.
    """
    ends: Any = (first, last - 1)
    for row_index, (bounds, padding) in enumerate(_get_documents(row)):
        for document in np.unique(np.searchsorted(bounds, ends, "right") - 1).tolist():
            start, end = int(bounds[document]), int(bounds[document + 1])
            if not padding[document] and (start < first or end > last):
                yield row_index, start, end
