"""Which tokens of whole rows some queries may look at: what has to be fetched where others hold them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.layers.attention.patterns.pattern import AttentionPattern, Ranges
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens


def reachable_keys(pattern: AttentionPattern, row: SequenceMetadata, places: Tensor) -> Tensor:
    """The places that queries at `places` may look at in any of the rows, ascending, these among them.

    All of them in the host's memory (`SequenceMetadata.on_host`). Padding, which only padding sees, is not looked for
    beyond `places`.
    """
    found = np.zeros(row.length, np.bool_)
    opened = None if row.prefix_mask is None else row.prefix_mask.numpy()
    at = places.numpy()
    found[at] = True
    for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
        first, last = int(run[0]), int(run[-1]) + 1
        for number, start, end in _cut_documents(row, first, last):
            length = end - start
            for begin, beyond in _runs(pattern, max(first - start, 0), min(last - start, length), length):
                found[start + max(begin, 0) : start + min(beyond, length)] = True
            if opened is not None:
                found[start:end] |= opened[number % len(opened), start:end]
    return torch.from_numpy(np.flatnonzero(found))


def _runs(pattern: AttentionPattern, first: int, last: int, length: int) -> Ranges:
    """As `Pattern.reach`, of patterns that look anywhere, too."""
    runs = pattern.key_ranges(first, last, length)
    if runs is not None:
        return runs
    return ((0, length if pattern.sees_later else last),)


def global_query_indices(
    pattern: AttentionPattern, row: SequenceMetadata, indices_by_rank: Sequence[Tensor]
) -> Tensor:
    """The places of wide queries in any of the rows, ascending, of documents that lie on several ranks.
    indices_by_rank: places by rank, in the host's memory as the row."""
    found, rank_of = np.zeros(row.length, np.bool_), np.zeros(row.length, np.int64)
    for rank, places in enumerate(indices_by_rank):
        rank_of[places.numpy()] = rank
    for bounds, padding in _documents(row) if pattern.global_queries(row.length) else ():
        for (start, end), is_padding in zip(pairwise(bounds.tolist()), padding, strict=True):
            if not is_padding and (rank_of[start:end] != rank_of[start]).any():
                for begin, beyond in pattern.global_queries(end - start):
                    found[start + begin : min(start + beyond, end)] = True
    return torch.from_numpy(np.flatnonzero(found))


Documents = list[tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""Of each row the bounds of its documents [C + 1], ascending, and which of them are padding [C]."""


def _documents(row: SequenceMetadata) -> Documents:
    return row.cached("bounds of documents", lambda: _find_documents(row))


def _find_documents(row: SequenceMetadata) -> Documents:
    numbers = row.document_ids()
    if numbers is None:
        return [(np.array([0, row.length]), np.zeros(1, np.bool_))] * len(row.positions)
    found = []
    for documents in numbers[0].numpy():
        starts = np.concatenate([[0], np.flatnonzero(np.diff(documents)) + 1])
        found.append((np.append(starts, len(documents)), documents[starts] < 0))
    return found


def _cut_documents(row: SequenceMetadata, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Row, begin and end of the documents, but for padding, that lie partly in a run of tokens: at most the one in
    which it begins and the one in which it ends. Those that it has whole see no others."""
    ends: Any = (first, last - 1)
    for number, (bounds, padding) in enumerate(_documents(row)):
        for at in np.unique(np.searchsorted(bounds, ends, "right") - 1).tolist():
            start, end = int(bounds[at]), int(bounds[at + 1])
            if not padding[at] and (start < first or end > last):
                yield number, start, end
