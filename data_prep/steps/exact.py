"""Identical texts, anywhere in the corpus: found by their hashes on disk, in bounded memory."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from data_prep.counts import EXAMPLES, Counts
from data_prep.documents import Document
from data_prep.duplicates.index import Rows, numbers_on_disk
from data_prep.words import Hashes

ROW = ("<u8", 2)
"""What is written for each document: two numbers, the first 16 bytes of its text's BLAKE3 hash."""
_CHUNK = 2**20


def digest(document: Document) -> bytes:
    """The row of a document."""
    return blake3(document.text.encode()).digest(16)


def firsts(rows: Rows, path: Path, memory_bytes: int) -> NDArray[np.int64]:
    """[documents]: the number of the first document with the same text, in a file that is mapped."""
    if not len(rows):
        return np.empty(0, np.int64)
    first = numbers_on_disk(path, len(rows))
    for places in rows.equal(_half, memory_bytes):
        for at in range(0, len(places), _CHUNK):
            later, earlier = places[at : at + _CHUNK].T
            same = (rows[later] == rows[earlier]).all(axis=1)
            first[later[same]] = earlier[same]
    return first


class ExactDuplicates:
    """Keeps the first of identical texts, in reading order; `first` is what `firsts` found for all documents."""

    def __init__(self, first: NDArray[np.int64]) -> None:
        self.counts = Counts("exact duplicates")
        self._first = first
        self._number = 0
        # Where the first ones of the examples lie is noted as they pass.
        self._sources = {int(first[number]): "" for number in islice(_later(first), EXAMPLES)}

    def __call__(self, document: Document) -> Document | None:
        number, first = self._number, int(self._first[self._number])
        self._number += 1
        self.counts.take(document.text_bytes)
        if number in self._sources:
            self._sources[number] = document.source
        if first != number:
            example = f"{document.source} = {self._sources.get(first, '')}"
            self.counts.drop("same text", document.text_bytes, example)
            return None
        self.counts.keep(document.text_bytes)
        return document


def _later(first: NDArray[np.int64]) -> Iterator[int]:
    """The numbers of documents that are not the first with their text."""
    for at in range(0, len(first), _CHUNK):
        some = first[at : at + _CHUNK]
        yield from (np.flatnonzero(some != np.arange(at, at + len(some))) + at).tolist()


def _half(rows: NDArray[Any]) -> Hashes:
    return np.asarray(rows[:, 0], np.uint64)
