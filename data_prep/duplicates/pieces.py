"""Lines and paragraphs that the corpus already had."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatfm.config.prep_steps import RepeatedLinesConfig, RepeatedParagraphsConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.index import DedupContext, Facts, KeyTable
from megatfm.data_prep.duplicates.later import mark_repeats
from megatfm.data_prep.steps.rule import example
from megatfm.data_prep.words import word_character_table

ROW = ("<u8", 1)
# CCNet: no accents, which are marks of their own once taken apart, lower case, every digit a 0, no punctuation. Vowel
# signs of Indian and other scripts are marks as well, but not accents: words differ in them. What stands between pieces
# stays.
_BETWEEN = "\0"
_ACCENTS = ("COMBINING ", "ARABIC ", "HEBREW ", "VARIATION ", "MONGOLIAN FREE VARIATION ")
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_NOT_WORDS = bytes(byte for byte in range(1, 128) if not chr(byte).isalnum())


class _TextUnitDedup:
    """Keeps the first of equal pieces of the whole corpus. A row is the hash of a piece that is long enough."""

    row = ROW

    def __init__(self, title: str, cut: re.Pattern[str], between: str, least: int, loose: bool) -> None:
        self.title = title
        self._cut, self._between, self._least, self._loose = cut, between, least, loose

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            keys = self._keys(self._cut.split(document.text))
            yield np.array([xxhash.xxh3_64_intdigest(key) for key in keys if key], "<u8")

    def find_duplicates(self, rows: KeyTable, index: DedupContext) -> Facts:
        return mark_repeats(rows, index)

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        at = 0
        for document in documents:
            counts.count_input(document.text_bytes)
            pieces = self._cut.split(document.text)
            kept, gone = [], 0
            for piece, key in zip(pieces, self._keys(pieces), strict=True):
                if key:
                    at += 1
                    if marks[at - 1]:
                        gone += 1
                        continue
                kept.append(piece)
            if gone:
                counts.count_event(f"{self.title} removed", gone)
            text = self._between.join(kept) if gone else document.text
            yield from emit_if_not_empty(document, text, counts)

    def _keys(self, pieces: Sequence[str]) -> list[bytes]:
        """What two pieces must have in common to count as equal; empty for one that always stays."""
        if not self._loose:
            return [piece.strip().encode() if len(piece) >= self._least else b"" for piece in pieces]
        joined = _BETWEEN.join(pieces)
        if joined.count(_BETWEEN) >= len(pieces):  # one of them has it
            keys = [_normalize(piece).replace(_BETWEEN.encode(), b"") for piece in pieces]
        else:
            keys = _normalize(joined).split(_BETWEEN.encode())
        return [key if len(piece) >= self._least else b"" for piece, key in zip(pieces, keys, strict=True)]


def _normalize(text: str) -> bytes:
    if not text.isascii():
        text = unicodedata.normalize("NFD", text.lower())
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        text = points[_is_kept()[points] | (points < 128)].tobytes().decode("utf-32-le")
    return text.encode().lower().translate(_DIGITS, _NOT_WORDS)


@cache
def _is_kept() -> NDArray[np.bool_]:
    """Return for every code point whether pieces that differ in it are different."""
    kept = word_character_table().copy()
    for point in range(0x20000):
        if unicodedata.category(chr(point))[0] == "M":
            kept[point] = not unicodedata.name(chr(point)).startswith(_ACCENTS)
    return kept


class LineDedup(_TextUnitDedup):
    """Keeps the first of equal lines."""

    def __init__(self, config: RepeatedLinesConfig) -> None:
        super().__init__("repeated lines", re.compile("\n"), "\n", config.min_characters, config.loose)


class ParagraphDedup(_TextUnitDedup):
    """Keeps the first of equal paragraphs."""

    def __init__(self, config: RepeatedParagraphsConfig) -> None:
        cut = re.compile(r"\n\s*\n")
        super().__init__("repeated paragraphs", cut, "\n\n", config.min_characters, config.loose)


def emit_if_not_empty(document: Document, text: str, counts: StepStats) -> Iterator[Document]:
    """The document with the text that is left of it, if any is."""
    if not text.strip():
        counts.count_dropped("has nothing left", document.text_bytes, example(document))
        return
    changed = text is not document.text
    counts.changed += changed
    result = replace(document, text=text) if changed else document
    counts.count_kept(result.text_bytes)
    yield result
