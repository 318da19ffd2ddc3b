"""The quality rules of Gopher."""

import re

from megatfm.config.prep_steps import GopherQualityConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.split_words import word_tokenizer

_BULLETS = ("•", "‣", "◦", "⁃", "∙", "·", "-", "*")
_ELLIPSES = ("...", "…")
_LINES = re.compile(r"\n+")


class GopherQuality:
    """Drops what is unlike prose (Rae et al. 2021, appendix A.1.1): lengths of documents and of words, symbols,
    lines that are bullets or end in an ellipsis, words without letters, too few of the commonest words."""

    title = "Gopher quality"

    def __init__(self, config: GopherQualityConfig) -> None:
        self._config = config
        self._words = word_tokenizer(config)
        self._stop_words = frozenset(config.stop_words)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        return self._drop_reason(document.text) or document

    def _drop_reason(self, text: str) -> str | None:
        limits, words = self._config, self._words(text)
        if len(words) < limits.min_words:
            return "has too few words"
        if len(words) > limits.max_words:
            return "has too many words"
        count = max(1, len(words))
        mean = sum(map(len, words)) / count
        if mean < limits.min_mean_word:
            return "has short words"
        if mean > limits.max_mean_word:
            return "has long words"
        if text.count("#") > limits.max_symbols * count:
            return "has many hash signs"
        if sum(map(text.count, _ELLIPSES)) > limits.max_symbols * count:
            return "has many ellipses"
        lines = [line.strip() for line in _LINES.split(text)]
        if sum(line.startswith(_BULLETS) for line in lines) > limits.max_bullet_lines * len(lines):
            return "is a list of bullets"
        if sum(line.endswith(_ELLIPSES) for line in lines) > limits.max_ellipsis_lines * len(lines):
            return "has many lines that end in an ellipsis"
        letters = sum(1 for word in words if word.isalpha() or any(map(str.isalpha, word)))
        if letters < limits.min_alphabetic * count:
            return "has many words without a letter"
        if len(self._stop_words.intersection(words)) < limits.min_stop_words:
            return "has too few common words"
        return None
