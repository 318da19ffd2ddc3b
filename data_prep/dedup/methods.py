"""Dedup methods: identical texts, repeated lines, paragraphs and substrings, and near duplicates by MinHash.

A method computes rows of keys for each part, marks duplicate rows (`first_occurrence.py`, `clusters.py`), and filters
the documents of each part by the marks of its rows.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.config.prep_steps import (
    DedupConfig,
    MinHashConfig,
    RepeatedLinesConfig,
    RepeatedParagraphsConfig,
    RepeatedSubstringsConfig,
)
from megatfm.data_prep.dedup.clusters import mark_near_duplicates
from megatfm.data_prep.dedup.first_occurrence import mark_repeats
from megatfm.data_prep.dedup.hashing import Hashes, make_word_character_table, sign_documents, splitmix64
from megatfm.data_prep.dedup.key_table import DedupContext, KeyTable
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.filters.base import format_example


class _RepeatedKeys:
    """Base of methods that mark each row whose key an earlier row has."""

    key_name = "keys"
    row = ("<u8", 1)

    def find_duplicates(self, rows: KeyTable, context: DedupContext) -> StageResult:
        return mark_repeats(rows, context)


class ExactDedup(_RepeatedKeys):
    """Keeps the first of identical texts. A row is the first 16 bytes of the BLAKE3 hash of a text.

    `find_duplicates` also returns some `examples`: [row, first row with the same text].
    """

    title = "exact duplicates"
    row = ("<u8", 2)
    reason = "exact_duplicate"

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            yield np.frombuffer(blake3(document.text.encode()).digest(16), "<u8")[None]

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        return _drop_marked(documents, marks, counts, self.reason, lambda document: document.id)


def _drop_marked(
    documents: Iterable[Document],
    marks: NDArray[np.uint8],
    counts: StepStats,
    reason: str,
    format_dropped: Callable[[Document], str],
) -> Iterator[Document]:
    """Yield the documents whose row has no mark."""
    for document, is_duplicate in zip(documents, marks.tolist(), strict=True):
        counts.count_input(document.text_bytes)
        if is_duplicate:
            counts.count_dropped(reason, document.text_bytes, format_dropped(document))
        else:
            counts.count_kept(document.text_bytes)
            yield document


# CCNet's normal form: lower case, no accents (separate marks after decomposition), no punctuation, every digit a 0.
# Vowel signs of Indian and other scripts are marks as well, but words differ in them, so they stay, as do separators.
_BETWEEN = "\0"
_ACCENTS = ("COMBINING ", "ARABIC ", "HEBREW ", "VARIATION ", "MONGOLIAN FREE VARIATION ")
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_NOT_WORDS = bytes(byte for byte in range(1, 128) if not chr(byte).isalnum())


class _TextUnitDedup(_RepeatedKeys):
    """Keeps the first of equal lines or paragraphs in the corpus. A row is the hash of a long enough one."""

    def __init__(self, title: str, cut: re.Pattern[str], separator: str, min_characters: int, normalize: bool) -> None:
        self.title = title
        self._cut, self._separator = cut, separator
        self._min_characters, self._normalizes = min_characters, normalize

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            keys = self._hash_units(self._cut.split(document.text))
            yield np.array([xxhash.xxh3_64_intdigest(key) for key in keys if key], "<u8")

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        n_rows = 0
        for document in documents:
            counts.count_input(document.text_bytes)
            units = self._cut.split(document.text)
            kept_units, n_removed = [], 0
            for unit, key in zip(units, self._hash_units(units), strict=True):
                if key:
                    n_rows += 1
                    if marks[n_rows - 1]:
                        n_removed += 1
                        continue
                kept_units.append(unit)
            if n_removed:
                counts.count_event(f"{self.title} removed", n_removed)
            text = self._separator.join(kept_units) if n_removed else document.text
            yield from _emit_if_not_empty(document, text, counts)

    def _hash_units(self, units: Sequence[str]) -> list[bytes]:
        """Return a key for each unit, the same for equal units; empty if the unit is always kept."""
        if not self._normalizes:
            return [unit.strip().encode() if len(unit) >= self._min_characters else b"" for unit in units]
        joined = _BETWEEN.join(units)
        if joined.count(_BETWEEN) >= len(units):  # a piece contains the separator
            keys = [_normalize(unit).replace(_BETWEEN.encode(), b"") for unit in units]
        else:
            keys = _normalize(joined).split(_BETWEEN.encode())
        return [key if len(unit) >= self._min_characters else b"" for unit, key in zip(units, keys, strict=True)]


def _normalize(text: str) -> bytes:
    if not text.isascii():
        text = unicodedata.normalize("NFD", text.lower())
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        text = points[_find_significant_points()[points] | (points < 128)].tobytes().decode("utf-32-le")
    return text.encode().lower().translate(_DIGITS, _NOT_WORDS)


@cache
def _find_significant_points() -> NDArray[np.bool_]:
    """Return for every code point whether units that differ only in it count as different."""
    is_significant = make_word_character_table().copy()
    for point in range(0x20000):
        if unicodedata.category(chr(point))[0] == "M":
            is_significant[point] = not unicodedata.name(chr(point)).startswith(_ACCENTS)
    return is_significant


class LineDedup(_TextUnitDedup):
    """Keeps the first of equal lines."""

    def __init__(self, config: RepeatedLinesConfig) -> None:
        super().__init__("repeated lines", re.compile("\n"), "\n", config.min_characters, config.normalize)


class ParagraphDedup(_TextUnitDedup):
    """Keeps the first of equal paragraphs."""

    def __init__(self, config: RepeatedParagraphsConfig) -> None:
        cut = re.compile(r"\n\s*\n")
        super().__init__("repeated paragraphs", cut, "\n\n", config.min_characters, config.normalize)


def _emit_if_not_empty(document: Document, text: str, counts: StepStats) -> Iterator[Document]:
    """Yield the document with its remaining text, unless that is empty."""
    if not text.strip():
        counts.count_dropped("empty", document.text_bytes, format_example(document))
        return
    changed = text is not document.text
    counts.changed += changed
    result = replace(document, text=text) if changed else document
    counts.count_kept(result.text_bytes)
    yield result


class MinhashDedup:
    """Keeps the first of documents that are near to each other, directly or through others.

    Two documents are near if they agree in all rows of a band of their MinHash signatures and the whole signatures
    give a Jaccard similarity of at least `similarity`. A row is a signature.
    """

    title = "MinHash dedup"
    key_name = "signatures"

    def __init__(self, config: MinHashConfig) -> None:
        self._config = config
        self._hashes = config.num_buckets * config.hashes_per_bucket
        self.row = ("<u4", self._hashes)

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for _, signs in sign_documents(documents, self._config.n_grams, self._hashes):
            yield signs

    def find_duplicates(self, rows: KeyTable, context: DedupContext) -> StageResult:
        return mark_near_duplicates(rows, context, self._config.num_buckets, self._config.similarity)

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        return _drop_marked(documents, marks, counts, "minhash_duplicate", format_example)


_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_BYTES = splitmix64(np.arange(1, 257, dtype=np.uint64))


class SubstringDedup(_RepeatedKeys):
    """Removes every substring of `min_bytes` that occurred before (Lee et al. 2022, section 4.1).

    A row is the hash of the substring that begins at a byte. All substrings are compared on disk; a suffix array would
    need the corpus in memory.
    """

    title = "exact substrings"

    def __init__(self, config: RepeatedSubstringsConfig) -> None:
        self._length = config.min_bytes

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            yield self._hash_substrings(document.text.encode()).astype("<u8")

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        n_rows = 0
        for document in documents:
            data = document.text.encode()
            counts.count_input(len(data))
            n_substrings = max(0, len(data) - self._length + 1)
            starts = np.flatnonzero(marks[n_rows : n_rows + n_substrings])
            n_rows += n_substrings
            text = document.text
            if len(starts):
                text = self._remove_substrings(data, starts)
                counts.count_event("bytes removed", len(data) - len(text.encode()))
            yield from _emit_if_not_empty(document, text, counts)

    def _hash_substrings(self, data: bytes) -> Hashes:
        """Return the hash of the substring of `min_bytes` that begins at each byte."""
        if len(data) < self._length:
            return np.empty(0, np.uint64)
        values = _BYTES[np.frombuffer(data, np.uint8)]
        powers = np.cumprod(np.full(len(data), _BASE, np.uint64), dtype=np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers, dtype=np.uint64)])
        inverses = np.cumprod(np.full(len(data) - self._length + 1, _INVERSE, np.uint64), dtype=np.uint64)
        return splitmix64((sums[self._length :] - sums[: -self._length]) * inverses)

    def _remove_substrings(self, data: bytes, starts: NDArray[np.int64]) -> str:
        """Return the text without the substrings at `starts`; a character is removed only with all of its bytes."""
        changes = np.zeros(len(data) + 1, np.int64)
        np.add.at(changes, starts, 1)
        np.add.at(changes, starts + self._length, -1)
        is_removed = np.cumsum(changes[:-1]) > 0
        values = np.frombuffer(data, np.uint8)
        character_starts = np.flatnonzero((values & 0xC0) != 0x80)
        is_character_removed = np.logical_and.reduceat(is_removed, character_starts)
        is_removed = np.repeat(is_character_removed, np.diff(np.append(character_starts, len(data))))
        return values[~is_removed].tobytes().decode()


class DedupMethod(Protocol):
    """One kind of duplicates. The result is the same however the corpus is cut into parts."""

    title: str
    key_name: str
    """Name of its keys, in the names of stages."""
    row: tuple[str, int]
    """Type and number of the integers in a row of keys."""

    def __init__(self, config: Any) -> None: ...

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        """Yield the rows of a part in order, a few documents at a time."""
        ...

    def find_duplicates(self, rows: KeyTable, context: DedupContext) -> StageResult:
        """Mark the duplicate rows of all parts, in files `marks`. Returns `each`, the number of rows in a file."""
        ...

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        """Yield the remaining documents of a part. marks: of its rows, 1 for a duplicate."""
        ...


DEDUP_METHODS: dict[str, type[DedupMethod]] = {
    "lines": LineDedup,
    "paragraphs": ParagraphDedup,
    "minhash": MinhashDedup,
    "exact_substrings": SubstringDedup,
}


def make_dedup_method(config: DedupConfig) -> DedupMethod:
    """Make the method that a table of `[[dedup]]` asks for."""
    return DEDUP_METHODS[config.name](config)
