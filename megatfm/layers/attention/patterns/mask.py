"""Masks of a pattern over a sequence, in every form that kernels need, and the keys that some queries see."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.layers.attention.patterns.pattern import AttentionPattern, Ranges, block_bounds
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.block_plan import bands
from megatfm.ops.attention.mask import Band, BuiltinMask

T = TypeVar("T")


class PatternMask:
    """An `ops.attention.mask.AttentionMask`: a pattern over a sequence, for heads from `first_head` on."""

    def __init__(
        self, pattern: AttentionPattern, sequence: SequenceMetadata, first_head: int = 0, n_heads: int = 1
    ) -> None:
        self._pattern, self._sequence = pattern.simplify(sequence.length), sequence
        self._heads = (first_head, n_heads) if pattern.differs_by_head else (0, 1)

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        return self._pattern.builtin_mask if self._pattern.is_builtin(self._sequence) else None

    @property
    def grain(self) -> int | None:
        return self._pattern.block_size

    @property
    def window(self) -> tuple[int, int] | None:
        sequence = self._sequence
        alone = sequence.is_full_sequence and not sequence.cached_length and sequence.prefix_mask is None
        has_boundaries = sequence.documents is None or sequence.cu_seqlens is not None
        return (
            self._pattern.window
            if alone and has_boundaries and not self._pattern.is_cross_attention
            else None
        )

    def starts(self) -> Tensor:
        return self._sequence.uniform_cu_seqlens()

    def mask(self) -> Tensor | None:
        return self._sequence.mask(self._pattern, *self._heads)

    def block_mask(self, size: int) -> Tensor:
        return self._pattern.block_table(self._sequence, size, *self._heads)

    def full_block_mask(self, size: int) -> Tensor:
        return self._pattern.block_table(self._sequence, size, *self._heads, full=True)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pattern, sequence = self._pattern, self._sequence
        places_q, places_k = pattern.places(sequence)
        row = b if len(places_q) > 1 else b * 0
        lengths = pattern.lengths(sequence).expand(len(places_q), places_q.shape[1])[row, q]
        is_visible = pattern.mask_mod_for_lengths(
            places_q[row, q], places_k[row, k], n + self._heads[0], lengths
        )
        if sequence.prefix_mask is not None:
            is_visible = is_visible | sequence.prefix_mask[b, k]
        numbers = sequence.document_ids(of_memory=pattern.is_cross_attention)
        return is_visible if numbers is None else is_visible & (numbers[0][b, q] == numbers[1][b, k])

    def translation_invariant_blocks(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Blocks of one document, in a pattern that distances say all of."""
        if (
            not (self._pattern.is_relative and self._sequence.is_full_sequence)
            or self._sequence.prefix_mask is not None
        ):
            return None
        numbers = self._sequence.document_ids(of_memory=self._pattern.is_cross_attention)
        if numbers is None:
            is_visible = self._sequence.indices.new_ones(1, 1).bool()
            q, k = len(self._sequence.indices), len(self._sequence.key_indices)
            return is_visible.expand(1, -(-q // size)), is_visible.expand(1, -(-k // size))
        bounds_q, bounds_k = (block_bounds(of, size, -1) for of in numbers)
        return (bounds_q.first == bounds_q.last)[:, 0, :, 0], (bounds_k.first == bounds_k.last)[:, 0, :, 0]

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """Bands of full rows without a prefix: one tile after the other in each document."""
        sides, sequence = self._pattern.band, self._sequence
        is_plain = sequence.is_full_sequence and not sequence.cached_length and sequence.prefix_mask is None
        if sides is None or not is_plain or self._pattern.is_cross_attention:
            return None
        return bands(sides, sequence.document_spans(), sequence.indices.device, fused=fused)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._sequence.cached((key, self._pattern, self._heads), make)


def reachable_keys(pattern: AttentionPattern, row: SequenceMetadata, places: Tensor) -> Tensor:
    """The places that queries at `places` may look at in any of the rows, ascending, these among them.

    All of them in the host's memory (`SequenceMetadata.on_host`). Padding, which only padding sees, is not looked for
    beyond `places`.
    """
    is_needed = np.zeros(row.length, np.bool_)
    in_prefix = None if row.prefix_mask is None else row.prefix_mask.numpy()
    at = places.numpy()
    is_needed[at] = True
    for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
        first, last = int(run[0]), int(run[-1]) + 1
        for number, start, end in _cut_documents(row, first, last):
            length = end - start
            for begin, beyond in _runs(pattern, max(first - start, 0), min(last - start, length), length):
                is_needed[start + max(begin, 0) : start + min(beyond, length)] = True
            if in_prefix is not None:
                is_needed[start:end] |= in_prefix[number % len(in_prefix), start:end]
    return torch.from_numpy(np.flatnonzero(is_needed))


def _runs(pattern: AttentionPattern, first: int, last: int, length: int) -> Ranges:
    """Ranges of keys that a pattern's queries see; all keys for patterns that look anywhere."""
    runs = pattern.key_ranges(first, last, length)
    if runs is not None:
        return runs
    return ((0, length if pattern.sees_later else last),)


def global_query_indices(
    pattern: AttentionPattern, row: SequenceMetadata, indices_by_rank: Sequence[Tensor]
) -> Tensor:
    """The places of wide queries in any of the rows, ascending, of documents that lie on several ranks.
    indices_by_rank: places by rank, in the host's memory as the row."""
    is_needed, rank_of = np.zeros(row.length, np.bool_), np.zeros(row.length, np.int64)
    for rank, places in enumerate(indices_by_rank):
        rank_of[places.numpy()] = rank
    for bounds, padding in _documents(row) if pattern.global_queries(row.length) else ():
        for (start, end), is_padding in zip(pairwise(bounds.tolist()), padding, strict=True):
            if not is_padding and (rank_of[start:end] != rank_of[start]).any():
                for begin, beyond in pattern.global_queries(end - start):
                    is_needed[start + begin : min(start + beyond, end)] = True
    return torch.from_numpy(np.flatnonzero(is_needed))


Documents = list[tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""Per row: bounds of its documents [C + 1], ascending, and which of them are padding [C]."""


def _documents(row: SequenceMetadata) -> Documents:
    return row.cached("bounds of documents", lambda: _find_documents(row))


def _find_documents(row: SequenceMetadata) -> Documents:
    numbers = row.document_ids()
    if numbers is None:
        return [(np.array([0, row.length]), np.zeros(1, np.bool_))] * len(row.positions)
    boundaries_by_row = []
    for documents in numbers[0].numpy():
        starts = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1])
        boundaries_by_row.append((np.append(starts, len(documents)), documents[starts] < 0))
    return boundaries_by_row


def _cut_documents(row: SequenceMetadata, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Row, begin and end of the documents, but for padding, that lie partly in a run of tokens: at most the one in
    which it begins and the one in which it ends. Those that it has whole see no others."""
    ends: Any = (first, last - 1)
    for number, (bounds, padding) in enumerate(_documents(row)):
        for at in np.unique(np.searchsorted(bounds, ends, "right") - 1).tolist():
            start, end = int(bounds[at]), int(bounds[at + 1])
            if not padding[at] and (start < first or end > last):
                yield number, start, end
