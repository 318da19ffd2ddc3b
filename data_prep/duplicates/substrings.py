"""Runs of bytes that the corpus already had."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import RepeatedSubstringsConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.index import DedupContext, Facts, KeyTable
from megatfm.data_prep.duplicates.later import mark_repeats
from megatfm.data_prep.duplicates.pieces import ROW, emit_if_not_empty
from megatfm.data_prep.words import Hashes, splitmix64

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_BYTES = splitmix64(np.arange(1, 257, dtype=np.uint64))


class SubstringDedup:
    """Removes every run of `min_bytes` that stood anywhere before, as a suffix array finds them (Lee et al. 2022,
    section 4.1), but with the first of them kept. A row is the hash of the run that begins at a byte: all runs are
    compared, on disk, where a suffix array would have to hold the corpus in memory.
    """

    title = "repeated substrings"
    row = ROW

    def __init__(self, config: RepeatedSubstringsConfig) -> None:
        self._length = config.min_bytes

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            yield self._runs(document.text.encode()).astype("<u8")

    def find_duplicates(self, rows: KeyTable, index: DedupContext) -> Facts:
        return mark_repeats(rows, index)

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        at = 0
        for document in documents:
            data = document.text.encode()
            counts.count_input(len(data))
            runs = max(0, len(data) - self._length + 1)
            begins = np.flatnonzero(marks[at : at + runs])
            at += runs
            text = document.text
            if len(begins):
                text = self._without(data, begins)
                counts.count_event("bytes removed", len(data) - len(text.encode()))
            yield from emit_if_not_empty(document, text, counts)

    def _runs(self, data: bytes) -> Hashes:
        """The hash of the run of `length` bytes from every byte on."""
        if len(data) < self._length:
            return np.empty(0, np.uint64)
        values = _BYTES[np.frombuffer(data, np.uint8)]
        powers = np.cumprod(np.full(len(data), _BASE, np.uint64), dtype=np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers, dtype=np.uint64)])
        inverses = np.cumprod(np.full(len(data) - self._length + 1, _INVERSE, np.uint64), dtype=np.uint64)
        return splitmix64((sums[self._length :] - sums[: -self._length]) * inverses)

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
