"""Which tokens of whole rows some queries may look at: what has to be fetched where others hold them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatfm.layers.attention.patterns.pattern import Pattern
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens


def reached(pattern: Pattern, row: SequenceMetadata, places: Tensor) -> Tensor | None:
    """The places that queries at `places` may look at in any of the rows, ascending; None: they may be anywhere.
    All of them in the host's memory (`SequenceMetadata.on_host`)."""
    if pattern.reach(0, 1, row.length) is None:
        return None
    found = np.zeros(row.length, np.bool_)
    opened = None if row.opened is None else row.opened.numpy()
    at = places.numpy()
    found[at] = True
    for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
        first, last = int(run[0]), int(run[-1]) + 1
        for number, start, end in _documents(row, first, last):
            length = end - start
            for begin, beyond in (
                pattern.reach(max(first - start, 0), min(last - start, length), length) or ()
            ):
                found[start + max(begin, 0) : start + min(beyond, length)] = True
            if opened is not None:
                found[start:end] |= opened[number % len(opened), start:end]
    return torch.from_numpy(np.flatnonzero(found))


def wide_queries(pattern: Pattern, row: SequenceMetadata, dealt: Sequence[Tensor]) -> Tensor:
    """The places of wide queries in any of the rows, ascending, of documents that lie on several ranks. dealt: places
    by rank, in the host's memory as the row."""
    found, rank_of = np.zeros(row.length, np.bool_), np.zeros(row.length, np.int64)
    for rank, places in enumerate(dealt):
        rank_of[places.numpy()] = rank
    for start, end in _bounds(row) if pattern.wide(row.length) else ():
        if (rank_of[start:end] != rank_of[start]).any():
            for begin, beyond in pattern.wide(end - start):
                found[start + begin : min(start + beyond, end)] = True
    return torch.from_numpy(np.flatnonzero(found))


def _bounds(row: SequenceMetadata) -> Iterator[tuple[int, int]]:
    """Begin and end of each document of each row."""
    numbers = row.document_numbers()
    if numbers is None:
        yield 0, row.length
        return
    for documents in numbers[0].numpy():
        yield from pairwise([0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)])


def _documents(row: SequenceMetadata, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Row, begin and end of the documents that lie partly in a run of tokens; those that it has whole see no others."""
    numbers = row.document_numbers()
    if numbers is None:
        yield from ((number, 0, row.length) for number in range(len(row.positions)))
        return
    for number, documents in enumerate(numbers[0].numpy()):
        bounds = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)]
        for start, end in pairwise(bounds):
            if start < last and end > first and (start < first or end > last):
                yield number, start, end
