"""Pieces: how documents are cut before an objective makes sequences of them, and how long those will be."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.keyed import piece_keys


class SequenceLengths(Protocol):
    """The part of an objective that is needed before any text is read."""

    @property
    def max_tokens(self) -> int | None: ...

    def sequence_lengths(
        self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]
    ) -> NDArray[np.int64]: ...


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Consecutive pieces of consecutive documents, in stored order. All arrays are [P]."""

    documents: NDArray[np.int64]
    """The document of each, counted from the first one given."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """0, 1, … in each document."""
    lengths: NDArray[np.int64]
    """Of the sequences that will be built, [P, sides]."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        columns = (self.documents, self.starts, self.ends, self.numbers, self.lengths)
        return sum(column.nbytes for column in columns)

    def iter_chunks(self) -> Iterator[tuple[int, int, int, int, list[int]]]:
        """Document, start, end, number and lengths of each piece, as plain numbers."""
        columns = (self.documents, self.starts, self.ends, self.numbers, self.lengths)
        return zip(*(column.tolist() for column in columns), strict=True)

    def without_empty(self) -> "ChunkTable":
        """The pieces that make a sequence: a side of them has tokens."""
        return self.take(np.flatnonzero(self.lengths.any(axis=1)))

    def take(self, chosen: NDArray[np.integer]) -> "ChunkTable":
        """Some of them, in the order given."""
        return ChunkTable(
            self.documents[chosen],
            self.starts[chosen],
            self.ends[chosen],
            self.numbers[chosen],
            self.lengths[chosen],
        )


def split_documents(
    n_tokens: NDArray[np.int64], objective: SequenceLengths, first: int, seed: int
) -> ChunkTable:
    """Cut documents of `n_tokens` [D], the first of which has the number `first` in its corpus.

    A document is cut into consecutive pieces of `objective.max_tokens`, of which the last may be shorter; an empty
    document is one empty piece. Pieces that make no sequence are among them, with lengths of 0.
    """
    most = objective.max_tokens
    if most is None:
        documents = np.arange(len(n_tokens))
        numbers, starts, ends = np.zeros_like(documents), np.zeros_like(documents), n_tokens
    else:
        counts = np.maximum(-(-n_tokens // most), 1)
        documents = np.repeat(np.arange(len(n_tokens)), counts)
        numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = numbers * most
        ends = np.minimum(starts + most, n_tokens[documents])
    keys = piece_keys(seed, first + documents, numbers)
    lengths = np.asarray(objective.sequence_lengths(ends - starts, keys), np.int64)
    return ChunkTable(documents, starts, ends, numbers, lengths.reshape(len(documents), -1))
