"""Documents that are nearly the same, anywhere in the corpus."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.counts import Counts
from data_prep.documents import Document
from data_prep.duplicates.index import Rows, numbers_on_disk
from data_prep.minhash import band_hashes, signed
from data_prep.steps.rule import example
from megatfm.config.prep_steps import AlikeConfig

PAIRS = 2**13
"""Pairs whose signatures are read at a time: 7 MB."""
SMALL = 32
"""In a bucket of up to so many documents all are compared with all; in a larger one each with the first of those that
are left, until none is."""


class Near:
    """Keeps the first of documents that are near to each other, directly or through others.

    Two documents are near if they agree in all rows of a band of their MinHash signatures and the whole signatures
    give a Jaccard similarity of at least `similarity`. A row is a signature.
    """

    title = "near duplicates of each other"

    def __init__(self, config: AlikeConfig) -> None:
        self._config = config
        self._hashes = config.bands * config.rows
        self.row = ("<u4", self._hashes)

    def scan(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for _, signs in signed(documents, self._config.shingle_words, self._hashes):
            yield signs

    def decide(self, rows: Rows, decision: Path, memory_bytes: int) -> None:
        # Itself for a document that stays, else an earlier one of its group.
        mapped = numbers_on_disk(decision, len(rows))
        first = np.asarray(mapped)
        for band in range(self._config.bands):
            for places in rows.equal(partial(band_hashes, band=band, width=self._config.rows), memory_bytes):
                self._join(rows, places, first)
        mapped.flush()

    def thin(
        self, documents: Iterable[Document], first: int, decision: NDArray[Any], counts: Counts
    ) -> Iterator[Document]:
        for number, document in enumerate(documents):
            counts.take(document.text_bytes)
            if decision[number] != first + number:
                counts.drop("near an earlier document", document.text_bytes, example(document))
                continue
            counts.keep(document.text_bytes)
            yield document

    def _join(self, rows: Rows, places: NDArray[np.int64], first: NDArray[np.int64]) -> None:
        """Join the documents of each bucket (the same second column) that are near; see SMALL."""
        while len(places):
            begins = np.flatnonzero(np.diff(places[:, 1], prepend=-1))
            sizes = np.diff(np.append(begins, len(places)))
            is_small = np.repeat(sizes <= SMALL, sizes)
            for pairs in _all_pairs(places[is_small, 0], sizes[sizes <= SMALL]):
                self._join_near(rows, pairs, first)
            places = places[~is_small]
            near = self._join_near(rows, places, first)
            places = places[~near]  # each one's first is near to itself, so there are fewer every time
            starts = np.concatenate([[True], places[1:, 1] != places[:-1, 1]])[: len(places)]
            places[:, 1] = places[np.maximum.accumulate(np.where(starts, np.arange(len(places)), 0)), 0]

    def _join_near(self, rows: Rows, pairs: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Join those pairs that are near; which ones were."""
        near = np.empty(len(pairs), np.bool_)
        for at in range(0, len(pairs), PAIRS):
            left, right = pairs[at : at + PAIRS].T
            agree = (rows[left] == rows[right]).mean(axis=1)
            near[at : at + PAIRS] = agree >= self._config.similarity
        for one, other in pairs[near].tolist():
            low, high = sorted((_root(first, one), _root(first, other)))
            first[high] = low
        numbers = np.unique(pairs)
        first[numbers] = [_root(first, number) for number in numbers.tolist()]
        return near


def _root(first: NDArray[np.int64], number: int) -> int:
    while (above := int(first[number])) != number:
        first[number] = first[above]
        number = above
    return number


def _all_pairs(members: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """All pairs inside groups of these sizes, which lie one after the other."""
    ends = np.cumsum(sizes)
    for size in np.unique(sizes):
        groups = members[(ends[sizes == size] - size)[:, None] + np.arange(size)]
        left, right = np.triu_indices(size, 1)
        yield np.stack([groups[:, left].ravel(), groups[:, right].ravel()], axis=1)
