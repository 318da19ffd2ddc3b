"""Gopher's rules of repetition."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import GopherRepetitionConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS
from megatfm.data_prep.filters.heuristics import make_word_tokenizer, repeated

Integers = NDArray[np.int64]


@STEPS.register("gopher_repetition")
class GopherRepetition:
    """Drops what repeats itself (Rae et al. 2021, table A1): lines, paragraphs, runs of words.

    The share of characters in repeated lines, paragraphs and runs of 5 to 10 words is that of the second and later
    times, runs counted without overlap and without the spaces in them; that in the most frequent run of 2 to 4 words is
    that of all times, with spaces. So counts datatrove, too; the paper leaves it open.
    """

    title = "Gopher repetition"

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._config = config
        self._words = make_word_tokenizer(config)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        return self._fault(document.text) or document

    def _fault(self, text: str) -> str | None:
        limits, stripped = self._config, text.strip()
        paragraphs = [piece for paragraph in stripped.split("\n\n") if (piece := paragraph.lstrip("\n"))]
        lines = [line for line in stripped.split("\n") if line]
        for title, pieces, share, characters in (
            ("para", paragraphs, limits.dup_para_frac, limits.dup_para_char_frac),
            ("line", lines, limits.dup_line_frac, limits.dup_line_char_frac),
        ):
            times, length = repeated(pieces)
            if times > share * len(pieces):
                return f"dup_{title}_frac"
            if length > characters * len(text):
                return f"dup_{title}_char_frac"
        runs = _Runs(self._words(text))
        for n, top in enumerate(limits.top_n_grams, 2):
            if runs.top_is_over(n, top * len(text)):
                return f"top_{n}_gram"
        longer = 2 + len(limits.top_n_grams)
        if runs.cover_at_most(longer, min(limits.dup_n_grams, default=1) * len(text)):
            return None
        for n, limit in enumerate(limits.dup_n_grams, longer):
            if runs.repeated_are_over(n, limit * len(text)):
                return f"duplicated_{n}_n_grams"
        return None


class _Runs:
    """The runs of `n` words of a text that occur more than once, for n = 1, 2, … by `grow`.

    A run can only be repeated where the runs of one word less at its begin and at its end are, so of each length only
    the places are kept at which the length before was repeated: few, in ordinary text. They also bound what longer
    runs can come to, and most texts are far below every limit: then nothing is counted.
    """

    def __init__(self, words: Sequence[str]) -> None:
        numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._code: Integers = np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
        self._ends = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=self._ends[1:])
        self.n = 1
        self._at: Integers = np.arange(len(words))
        self._times: Integers = np.empty(0, np.int64)
        self._stretches: tuple[Integers, Integers] | None = None
        self._keep(np.bincount(self._code))

    def grow(self) -> None:
        """Lengthen the runs by one word."""
        self.n += 1
        begins = np.flatnonzero(self._at[1:] == self._at[:-1] + 1)
        pairs = self._code[begins] * len(self._ends) + self._code[begins + 1]
        self._at = self._at[begins]
        # The numbering of np.unique, which takes three times as long for so few.
        order = pairs.argsort()
        pairs = pairs[order]
        is_new = np.zeros(len(pairs), np.int64)
        is_new[1:] = pairs[1:] != pairs[:-1]
        numbers = is_new.cumsum()
        self._code = np.empty(len(pairs), np.int64)
        self._code[order] = numbers
        self._keep(np.bincount(numbers))

    def top_is_over(self, n: int, limit: float) -> bool:
        """Whether all occurrences of the most frequent run of `n` words have more than `limit` characters."""
        while self.n < n:
            if self._top_at_most(n) <= limit:
                return False
            self.grow()
        return self.top_characters() > limit

    def repeated_are_over(self, n: int, limit: float) -> bool:
        """Whether repeated runs of `n` words have more than `limit` characters in total."""
        return not self.cover_at_most(n, limit) and self.repeated_characters() > limit

    def cover_at_most(self, n: int, limit: float) -> bool:
        """Whether all words that may lie in repeated runs of `n` words, and so those in longer ones, have no more
        characters; if not, the runs have grown to `n` words."""
        while self._covered(n) > limit:
            if self.n == n:
                return False
            self.grow()
        return True

    def top_characters(self) -> int:
        """Characters in the most frequent run, with its spaces; of equally frequent ones the first."""
        if not len(self._at):
            return self._first(self.n)
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

    def _keep(self, times: Integers) -> None:
        """Keep only the places whose run occurs more than once. times: of each run."""
        is_repeated = times[self._code] > 1
        self._at, self._code = self._at[is_repeated], self._code[is_repeated]
        self._times = times[self._code]
        self._stretches = None

    def _top_at_most(self, n: int) -> int:
        """At least `top_characters` of runs of `n` words: none is more frequent than its first words are."""
        at = self._at[: np.searchsorted(self._at, len(self._ends) - n)]
        lengths = self._ends[at + n] - self._ends[at] + n - 1
        return max(int((lengths * self._times[: len(at)]).max(initial=0)), self._first(n))

    def _covered(self, n: int) -> int:
        """Characters of all words that may lie in a repeated run of `n` words."""
        if self._stretches is None:  # of consecutive places
            breaks = np.flatnonzero(self._at[1:] != self._at[:-1] + 1)
            first = np.append(self._at[:1], self._at[breaks + 1])
            last = np.append(self._at[breaks], self._at[-1:])
            self._stretches = last - first, self._ends[last + self.n] - self._ends[first]
        lengths, characters = self._stretches
        return int(characters[lengths >= n - self.n].sum())

    def _first(self, n: int) -> int:
        """Characters of the text's first run, with its spaces."""
        return int(self._ends[n]) + n - 1 if n < len(self._ends) else 0

    def _length(self, at: int) -> int:
        return int(self._ends[at + self.n] - self._ends[at])
