"""Which language a text is in, by py3langid (Lui and Baldwin 2012, langid.py: naive Bayes over byte n-grams)."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from megatfm.config.prep_steps import LanguageConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean

WINDOWS = 5
LONGEST = 6
"""Bytes of the model's longest n-gram: what came before so many can't change what is found at the last of them."""
_NO_TEXT = b"\xff"
"""A byte that is in no UTF-8, and so in no n-gram."""


class Language:
    """Marks each document with its language, and keeps those that are asked for.

    The model comes with the package; nothing is fetched. It always knows all of its 140 languages: to leave
    some out would only hide a wrong guess behind another.
    """

    title = "language"

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self._keep = frozenset(config.keep)
        known = sorted(set(map(str, _identifier().nb_classes))) if self._keep else []
        if unknown := sorted(self._keep.difference(known)) if known else []:
            raise UsageError(
                f"steps: language: keep = {unknown[0]!r} is no code of a language"
                f"{did_you_mean(unknown[0].lower()[:2], known)}; "
                f"the codes are {', '.join(known)}"
            )

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        found, probability = _identifier().classify(_sample_windows(document.text, self._config.characters))
        language = str(found)
        counts.count_event(language)
        if self._keep and language not in self._keep:
            return f"is in another language ({language})"
        if probability < self._config.min_probability:
            return "is in no certain language"
        return replace(document, language=language)


def _sample_windows(text: str, characters: int) -> str:
    """As many characters of a text, from windows that lie evenly over it: its begin and end may be in another language
    than the rest, and so may any one place."""
    length = -(-characters // WINDOWS)
    if len(text) <= WINDOWS * length:
        return text
    gap = (len(text) - length) / (WINDOWS - 1)
    return "\n".join(text[begin : begin + length] for begin in (round(gap * at) for at in range(WINDOWS)))


class _Identifier(LanguageIdentifier):  # type: ignore[misc]
    """The library's own, with the same results to the last bit, but for its two slow places: n-grams are found at all
    bytes of a text at once, and weights are stored as the numbers that are added up."""

    nb_ptc: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.nb_ptc = self.nb_ptc.astype(np.float32)
        # A state machine: each state has a row of the states that follow after each byte, and perhaps a feature.
        self._states = np.asarray(self.tk_nextmove)
        self._features = np.asarray(self.tk_output, np.int32)
        self._next = np.asarray(self._rowbase, np.int32)[self._states]  # where the row of that state begins
        first = self._next[self._rowbase[0] :][:256]
        self._pairs = self._next[
            first[:, None] + np.arange(256)
        ].ravel()  # the same after two bytes from the start

    def _raw_score(self, text: bytes) -> Any:
        data = np.frombuffer(_NO_TEXT * (LONGEST - 1) + text, np.uint8).astype(np.intp)
        row = self._pairs[data[: len(text)] * 256 + data[1:][: len(text)]]
        for at in range(2, LONGEST - 1):
            row = self._next[row + data[at:][: len(text)]]
        found = self._features[self._states[row + data[LONGEST - 1 :]]]
        times = Counter(found[found >= 0].tolist())
        return self._sparse_score(times, self.nb_ptc) if times else super()._raw_score(text)


@cache
def _identifier() -> LanguageIdentifier:
    return _Identifier.from_model_file(MODEL_FILE, norm_probs=True)
