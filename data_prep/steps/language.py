"""Which language a text is in, by py3langid (Lui and Baldwin 2012, langid.py: naive Bayes over byte n-grams)."""

from dataclasses import replace
from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from data_prep.counts import Counts
from data_prep.documents import Document
from megatfm.config.prep_steps import LanguageConfig

WINDOWS = 5


class Language:
    """Marks each document with its language, and keeps those that are asked for.

    The model comes with the package; nothing is fetched. It always knows all of its 97 languages: to leave some
    out would only hide a wrong guess behind another.
    """

    title = "language"

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self._keep = frozenset(config.keep)

    def apply(self, document: Document, counts: Counts) -> Document | str:
        found, probability = _identifier().classify(_looked_at(document.text, self._config.characters))
        language = str(found)
        counts.meet(language)
        if self._keep and language not in self._keep:
            return f"is in another language ({language})"
        if probability < self._config.min_probability:
            return "is in no certain language"
        return replace(document, language=language)


def _looked_at(text: str, characters: int) -> str:
    """As many characters of a text, from windows that lie evenly over it: its begin and end may be in another language
    than the rest, and so may any one place."""
    length = -(-characters // WINDOWS)
    if len(text) <= WINDOWS * length:
        return text
    gap = (len(text) - length) / (WINDOWS - 1)
    return "\n".join(text[begin : begin + length] for begin in (round(gap * at) for at in range(WINDOWS)))


@cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
