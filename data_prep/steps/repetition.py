"""The repetition rules of Gopher."""

import re
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from data_prep.counts import Counts
from data_prep.documents import Document
from megatfm.config.prep_steps import GopherRepetitionConfig

_LINES, _PARAGRAPHS = re.compile(r"\n+"), re.compile(r"\n{2,}")

Integers = NDArray[np.int64]


class GopherRepetition:
    """Drops what repeats itself (Rae et al. 2021, table A1): lines, paragraphs, runs of words.

    The share of characters in repeated lines, paragraphs and runs of 5 to 10 words is that of the second and later
    times, runs counted without overlap and without the spaces in them; that in the most frequent run of 2 to 4 words is
    that of all times, with spaces. So counts datatrove, too; the paper leaves it open.
    """

    title = "Gopher repetition"

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._config = config

    def apply(self, document: Document, counts: Counts) -> Document | str:
        return self._fault(document.text) or document

    def _fault(self, text: str) -> str | None:
        limits, stripped = self._config, text.strip()
        for title, pieces, share, characters in (
            ("paragraphs", _PARAGRAPHS.split(stripped), limits.paragraphs, limits.paragraph_characters),
            ("lines", _LINES.split(stripped), limits.lines, limits.line_characters),
        ):
            times, length = repeated(pieces)
            if times > share * len(pieces):
                return f"has repeated {title}"
            if length > characters * len(text):
                return f"has much text in repeated {title}"
        runs = _Runs(text.split())
        for top in limits.top_ngrams:
            runs.grow()
            if runs.top_characters() > top * len(text):
                return f"repeats a run of {runs.n} words"
        for most in limits.repeated_ngrams:
            runs.grow()
            if runs.repeated_characters() > most * len(text):
                return f"repeats runs of {runs.n} words"
        return None


class _Runs:
    """The n-grams of a text's words that occur more than once, for n = 1, 2, … by `grow`.

    An n-gram can only be repeated where its first n − 1 words are, so of each length only the places are kept at
    which the length before was repeated: few, in ordinary text.
    """

    def __init__(self, words: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        fresh = count()
        self._word = np.fromiter(
            (numbers.setdefault(word, next(fresh)) for word in words), np.int64, len(words)
        )
        self._ends = np.cumsum([0, *map(len, words)], dtype=np.int64)
        self.n = 0
        self._at: Integers = np.arange(len(words))
        self._code: Integers = np.zeros(len(words), np.int64)
        self._times: Integers = np.ones(len(words), np.int64)
        self._first_length = 0
        self.grow()

    def grow(self) -> None:
        """To runs of one word more."""
        self.n += 1
        fits = self._at + self.n <= len(self._word)
        at, code = self._at[fits], self._code[fits]
        self._first_length = int(self._ends[self.n] - self._ends[0]) if self.n <= len(self._word) else 0
        _, code, times = np.unique(
            code * len(self._word) + self._word[at + self.n - 1], return_inverse=True, return_counts=True
        )
        again = times[code] > 1
        self._at, self._code, self._times = at[again], code[again], times[code[again]]

    def top_characters(self) -> int:
        """Characters in the most frequent run, with its spaces; of equally frequent ones the first."""
        if not len(self._at):
            return self._first_length + self.n - 1 if self._first_length else 0
        best = int(np.argmax(self._times))
        return int(self._times[best]) * (self._length(int(self._at[best])) + self.n - 1)

    def repeated_characters(self) -> int:
        """Characters in runs that came before; after such a run the next may begin, not inside it."""
        seen: set[int] = set()
        length = end = 0
        for at, code in zip(self._at.tolist(), self._code.tolist(), strict=True):
            if at < end:
                continue
            if code in seen:
                length += self._length(at)
                end = at + self.n
            else:
                seen.add(code)
        return length

    def _length(self, at: int) -> int:
        return int(self._ends[at + self.n] - self._ends[at])


def repeated(pieces: Sequence[str]) -> tuple[int, int]:
    """How many pieces came before, and their characters."""
    if len(pieces) == len(set(pieces)):
        return 0, 0
    seen: set[str] = set()
    times = length = 0
    for piece in pieces:
        if piece in seen:
            times, length = times + 1, length + len(piece)
        seen.add(piece)
    return times, length
