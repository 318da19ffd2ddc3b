"""Runs of bytes that the corpus already had."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import RepeatedSubstringsConfig
from megatfm.data_prep.counts import Counts
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.index import Facts, Index, Rows
from megatfm.data_prep.duplicates.later import mark_later_ones
from megatfm.data_prep.duplicates.pieces import ROW, rest
from megatfm.data_prep.words import Hashes, mix

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_BYTES = mix(np.arange(1, 257, dtype=np.uint64))


class Substrings:
    """Removes every run of `min_bytes` that stood anywhere before, as a suffix array finds them (Lee et al. 2022,
    section 4.1), but with the first of them kept. A row is the hash of the run that begins at a byte: all runs are
    compared, on disk, where a suffix array would have to hold the corpus in memory.
    """

    title = "repeated substrings"
    row = ROW

    def __init__(self, config: RepeatedSubstringsConfig) -> None:
        self._length = config.min_bytes

    def scan(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            yield self._runs(document.text.encode()).astype("<u8")

    def find(self, rows: Rows, index: Index) -> Facts:
        return mark_later_ones(rows, index)

    def thin(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: Counts
    ) -> Iterator[Document]:
        at = 0
        for document in documents:
            data = document.text.encode()
            counts.take(len(data))
            runs = max(0, len(data) - self._length + 1)
            begins = np.flatnonzero(marks[at : at + runs])
            at += runs
            text = document.text
            if len(begins):
                text = self._without(data, begins)
                counts.meet("bytes removed", len(data) - len(text.encode()))
            yield from rest(document, text, counts)

    def _runs(self, data: bytes) -> Hashes:
        """The hash of the run of `length` bytes from every byte on."""
        if len(data) < self._length:
            return np.empty(0, np.uint64)
        values = _BYTES[np.frombuffer(data, np.uint8)]
        powers = np.cumprod(np.full(len(data), _BASE, np.uint64), dtype=np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers, dtype=np.uint64)])
        inverses = np.cumprod(np.full(len(data) - self._length + 1, _INVERSE, np.uint64), dtype=np.uint64)
        return mix((sums[self._length :] - sums[: -self._length]) * inverses)

    def _without(self, data: bytes, begins: NDArray[np.int64]) -> str:
        """The text without the runs that begin there; a character goes only if all of its bytes do."""
        edges = np.zeros(len(data) + 1, np.int64)
        np.add.at(edges, begins, 1)
        np.add.at(edges, begins + self._length, -1)
        gone = np.cumsum(edges[:-1]) > 0
        values = np.frombuffer(data, np.uint8)
        starts = np.flatnonzero((values & 0xC0) != 0x80)  # of characters
        whole = np.logical_and.reduceat(gone, starts)
        gone = np.repeat(whole, np.diff(np.append(starts, len(data))))
        return values[~gone].tobytes().decode()
