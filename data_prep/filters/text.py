"""Steps that change text: Unicode repair, normal forms, text from HTML; and the language of a document."""

import re
import unicodedata
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import ftfy
import numpy as np
from ftfy.badness import is_bad
from ftfy.chardata import CONTROL_CHARS
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from resiliparse.extract.html2text import extract_plain_text

from megatfm.config.prep_steps import HtmlConfig, LanguageConfig, NormalizeConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean


@STEPS.register("normalize")
class Normalize:
    """Converts text to a normal form (Unicode Standard Annex 15), by the tables of this Python."""

    title = "normal form"

    def __init__(self, config: NormalizeConfig) -> None:
        self._form = config.form

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        if document.text.isascii() or unicodedata.is_normalized(self._form, document.text):
            return document
        return replace(document, text=unicodedata.normalize(self._form, document.text))


# Only damage from wrong decoding is repaired. An &amp;, a curly quote, a ligature or a full-width letter may be meant,
# as in source code, and so may the normal form: of the standard library NFC would change one file, re/_casefix.py, a
# table of letters that differ in nothing else.
REPAIR = ftfy.TextFixerConfig(
    unescape_html=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    normalization=None,
    explain=False,
)
# Characters that ftfy's fixers look for besides mojibake: control characters of both kinds, line breaks other than \n,
# halves of surrogate pairs. A line without these that does not look like mojibake is one that ftfy leaves alone.
_ODD = re.compile(f"[{re.escape(''.join(map(chr, CONTROL_CHARS)))}\r\x80-\x9f\u2028\u2029\ud800-\udfff]")

_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class FixUnicode:
    """Repairs mojibake, stray control characters, byte order marks, surrogates and foreign line breaks."""

    title = "fix unicode"

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        text = fix_text(document.text)
        return document if text is document.text else replace(document, text=text)


def fix_text(text: str) -> str:
    """Return `ftfy.fix_text(text)`, as the same object if nothing changed.

    ftfy repairs line by line, each by itself, so it is only asked for the lines that it could change.
    """
    is_odd = _ODD.search(text) is not None
    if text.isascii() and not is_odd:
        return text
    lines = _LINE.findall(text)
    changed = False
    for index, line in enumerate(lines):
        if (not line.isascii() or is_odd) and (_ODD.search(line) or is_bad(line)):
            lines[index] = ftfy.fix_text(line, REPAIR)
            changed = changed or lines[index] != line
    return "".join(lines) if changed else text


_TAG = re.compile(r"<(?:!doctype|html|head|body|div|p|br|h[1-6]|ul|ol|table|span|a)\b[^<>]{0,2000}>", re.IGNORECASE)


@STEPS.register("html")
class Html:
    """Extracts the text of documents with common HTML tags."""

    title = "HTML"

    def __init__(self, config: HtmlConfig) -> None:
        self._main_content = config.main_content

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        if "<" not in document.text or not _TAG.search(document.text):
            counts.count_event("without_tags")
            return document
        text = extract_plain_text(
            document.text,
            main_content=self._main_content,
            alt_texts=False,
            links=False,
            form_fields=False,
            noscript=False,
        )
        return replace(document, text=text) if text.strip() else "no_content"


WINDOWS = 5
MAX_NGRAM_BYTES = 6
"""Bytes of the model's longest n-gram; bytes before can't change the n-grams that end at a byte."""
_NO_TEXT = b"\xff"
"""A byte that never occurs in UTF-8, and so in no n-gram."""


@STEPS.register("language")
class Language:
    """Identifies each document's language, and keeps the listed ones, by py3langid (Lui and Baldwin 2012).

    langid.py is naive Bayes over byte n-grams. The model is part of the package. All of its 140 languages are
    candidates, since leaving some out would only replace a wrong guess by another.
    """

    title = "language"

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self._keep = frozenset(config.languages)
        known_languages = sorted(set(map(str, _load_identifier().nb_classes))) if self._keep else []
        if unknown := sorted(self._keep.difference(known_languages)) if known_languages else []:
            raise UsageError(
                f"steps: language: languages = {unknown[0]!r} is no code of a language"
                f"{did_you_mean(unknown[0].lower()[:2], known_languages)}; "
                f"the codes are {', '.join(known_languages)}"
            )

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        label, probability = _load_identifier().classify(_sample_windows(document.text, self._config.max_characters))
        language = str(label)
        counts.count_event(language)
        if self._keep and language not in self._keep:
            return f"language_{language}"
        if probability < self._config.language_threshold:
            return "language_threshold"
        return replace(document, language=language)


def _sample_windows(text: str, characters: int) -> str:
    """Return `characters` of a text, from evenly spaced windows, since parts of it may be in another language."""
    length = -(-characters // WINDOWS)
    if len(text) <= WINDOWS * length:
        return text
    gap = (len(text) - length) / (WINDOWS - 1)
    return "\n".join(text[start : start + length] for start in (round(gap * window) for window in range(WINDOWS)))


class _Identifier(LanguageIdentifier):  # type: ignore[misc]
    """py3langid's identifier, faster and with bit-identical results.

    N-grams are found at all bytes of a text at once, and weights are stored in the type in which they are summed.
    """

    nb_ptc: Any

    def __init__(self, *arguments: Any, **keyword_arguments: Any) -> None:
        super().__init__(*arguments, **keyword_arguments)
        self.nb_ptc = self.nb_ptc.astype(np.float32)
        # A state machine: each state has a row with the next state for each byte, and maybe a feature.
        self._states = np.asarray(self.tk_nextmove)
        self._features = np.asarray(self.tk_output, np.int32)
        self._next = np.asarray(self._rowbase, np.int32)[self._states]  # where the row of that state begins
        first = self._next[self._rowbase[0] :][:256]
        # The row after two bytes from the start.
        self._pairs = self._next[first[:, None] + np.arange(256)].ravel()

    def _raw_score(self, text: bytes) -> Any:
        data = np.frombuffer(_NO_TEXT * (MAX_NGRAM_BYTES - 1) + text, np.uint8).astype(np.intp)
        row = self._pairs[data[: len(text)] * 256 + data[1:][: len(text)]]
        for offset in range(2, MAX_NGRAM_BYTES - 1):
            row = self._next[row + data[offset:][: len(text)]]
        features = self._features[self._states[row + data[MAX_NGRAM_BYTES - 1 :]]]
        feature_counts = Counter(features[features >= 0].tolist())
        return self._sparse_score(feature_counts, self.nb_ptc) if feature_counts else super()._raw_score(text)


@cache
def _load_identifier() -> LanguageIdentifier:
    return _Identifier.from_model_file(MODEL_FILE, norm_probs=True)
