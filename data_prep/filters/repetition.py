"""Gopher's rules of repetition."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import GopherRepetitionConfig
from megatfm.data_prep.filters.base import STEPS
from megatfm.data_prep.filters.heuristics import RuleFilter, count_repeated, make_word_tokenizer

Integers = NDArray[np.int64]


@STEPS.register("gopher_repetition")
class GopherRepetition(RuleFilter):
    """Drops documents with repeated lines, paragraphs or n-grams of words (Rae et al. 2021, table A1).

    Characters of repeated lines, paragraphs and n-grams of 5 to 10 words are those of the second and later occurrences,
    n-grams without overlap and without their spaces. Characters of the most frequent n-gram of 2 to 4 words are those
    of all occurrences, with spaces. datatrove counts alike; the paper leaves it open.
    """

    title = "Gopher repetition"

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._config, self._words = config, make_word_tokenizer(config)

    def _drop_reason(self, text: str) -> str | None:
        limits, stripped = self._config, text.strip()
        paragraphs = [
            stripped_paragraph for paragraph in stripped.split("\n\n") if (stripped_paragraph := paragraph.lstrip("\n"))
        ]
        lines = [line for line in stripped.split("\n") if line]
        for title, units, share, characters in (
            ("para", paragraphs, limits.dup_para_frac, limits.dup_para_char_frac),
            ("line", lines, limits.dup_line_frac, limits.dup_line_char_frac),
        ):
            n_repeated, n_characters = count_repeated(units)
            if n_repeated > share * len(units):
                return f"dup_{title}_frac"
            if n_characters > characters * len(text):
                return f"dup_{title}_char_frac"
        ngrams = _RepeatedNgrams(self._words(text))
        for n, top in enumerate(limits.top_n_grams, 2):
            if ngrams.is_top_over(n, top * len(text)):
                return f"top_{n}_gram"
        next_n = 2 + len(limits.top_n_grams)
        if ngrams.covers_at_most(next_n, min(limits.dup_n_grams, default=1) * len(text)):
            return None
        for n, limit in enumerate(limits.dup_n_grams, next_n):
            if ngrams.are_repeated_over(n, limit * len(text)):
                return f"duplicated_{n}_n_grams"
        return None


class _RepeatedNgrams:
    """The n-grams of a text's words that occur more than once, for n = 1, 2, … by `grow`.

    An n-gram can only be repeated if both (n − 1)-grams inside it are. So only positions are kept at which the length
    before was repeated: few, in ordinary text. They also bound the characters of longer n-grams, and most texts are far
    below every limit: then nothing is counted.
    """

    def __init__(self, words: Sequence[str]) -> None:
        word_indices: defaultdict[str, int] = defaultdict(count().__next__)
        self._codes: Integers = np.fromiter(map(word_indices.__getitem__, words), np.int64, len(words))
        self._ends = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=self._ends[1:])
        self.n = 1
        self._positions: Integers = np.arange(len(words))
        self._counts: Integers = np.empty(0, np.int64)
        self._stretches: tuple[Integers, Integers] | None = None
        self._keep(np.bincount(self._codes))

    def grow(self) -> None:
        """Go on to n-grams of one more word."""
        self.n += 1
        starts = np.flatnonzero(self._positions[1:] == self._positions[:-1] + 1)
        pairs = self._codes[starts] * len(self._ends) + self._codes[starts + 1]
        self._positions = self._positions[starts]
        # The numbering of np.unique, which takes three times as long for so few.
        order = pairs.argsort()
        pairs = pairs[order]
        is_new = np.zeros(len(pairs), np.int64)
        is_new[1:] = pairs[1:] != pairs[:-1]
        codes = is_new.cumsum()
        self._codes = np.empty(len(pairs), np.int64)
        self._codes[order] = codes
        self._keep(np.bincount(codes))

    def is_top_over(self, n: int, limit: float) -> bool:
        """Return whether all occurrences of the most frequent n-gram have more than `limit` characters."""
        while self.n < n:
            if self._bound_top_characters(n) <= limit:
                return False
            self.grow()
        return self.count_top_characters() > limit

    def are_repeated_over(self, n: int, limit: float) -> bool:
        """Return whether repeated n-grams have more than `limit` characters in total."""
        return not self.covers_at_most(n, limit) and self.count_repeated_characters() > limit

    def covers_at_most(self, n: int, limit: float) -> bool:
        """Return whether all words that may be in repeated n-grams, or longer ones, have at most `limit` characters.

        If not, the n-grams have grown to `n` words.
        """
        while self._count_covered_characters(n) > limit:
            if self.n == n:
                return False
            self.grow()
        return True

    def count_top_characters(self) -> int:
        """Count the characters of all occurrences of the (first) most frequent n-gram, with spaces."""
        if not len(self._positions):
            return self._measure_first_ngram(self.n)
        best = int(np.argmax(self._counts))
        return int(self._counts[best]) * (self._measure_ngram(int(self._positions[best])) + self.n - 1)

    def count_repeated_characters(self) -> int:
        """Count the characters of repeated n-grams, without overlap."""
        known_codes: set[int] = set()
        length = end = 0
        for position, code in zip(self._positions.tolist(), self._codes.tolist(), strict=True):
            if position < end:
                continue
            if code in known_codes:
                length += self._measure_ngram(position)
                end = position + self.n
            else:
                known_codes.add(code)
        return length

    def _keep(self, counts: Integers) -> None:
        """Keep the positions whose n-gram occurs more than once. counts: occurrences by code."""
        is_repeated = counts[self._codes] > 1
        self._positions, self._codes = self._positions[is_repeated], self._codes[is_repeated]
        self._counts = counts[self._codes]
        self._stretches = None

    def _bound_top_characters(self, n: int) -> int:
        """Return an upper bound of `count_top_characters` of n-grams: none is more frequent than its first words."""
        positions = self._positions[: np.searchsorted(self._positions, len(self._ends) - n)]
        lengths = self._ends[positions + n] - self._ends[positions] + n - 1
        return max(int((lengths * self._counts[: len(positions)]).max(initial=0)), self._measure_first_ngram(n))

    def _count_covered_characters(self, n: int) -> int:
        """Count the characters of all words that may be in a repeated n-gram."""
        if self._stretches is None:  # of consecutive places
            breaks = np.flatnonzero(self._positions[1:] != self._positions[:-1] + 1)
            first = np.append(self._positions[:1], self._positions[breaks + 1])
            last = np.append(self._positions[breaks], self._positions[-1:])
            self._stretches = last - first, self._ends[last + self.n] - self._ends[first]
        lengths, characters = self._stretches
        return int(characters[lengths >= n - self.n].sum())

    def _measure_first_ngram(self, n: int) -> int:
        """Return the characters of the text's first n-gram, with spaces."""
        return int(self._ends[n]) + n - 1 if n < len(self._ends) else 0

    def _measure_ngram(self, position: int) -> int:
        return int(self._ends[position + self.n] - self._ends[position])
