"""What a word is to the quality rules: what stands between white space, or what spaCy says."""

from collections.abc import Callable
from typing import Any, Protocol

from megatfm.errors import UsageError


class WordTokenizerConfig(Protocol):
    """The part of a step's config that says it."""

    @property
    def words(self) -> str: ...
    @property
    def language(self) -> str: ...


def word_tokenizer(config: WordTokenizerConfig) -> Callable[[str], list[str]]:
    """Text → its words. Raises UsageError where spaCy, or a language of it, is not there."""
    return str.split if config.words == "space" else _SpacyWords(config.language)


class _SpacyWords:
    """spaCy's tokenizer of a language, which is made of rules and needs no model: its tokens but for white space."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._tokenizer: Any = _blank(language)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SpacyWords, (self.language,)

    def __call__(self, text: str) -> list[str]:
        with self._tokenizer.memory_zone():
            self._tokenizer.max_length = len(text) + 10
            return [word for token in self._tokenizer.make_doc(text) if (word := token.text.strip())]


def _blank(language: str) -> Any:
    try:
        import spacy
    except ImportError as error:
        raise UsageError(
            'steps: words = "spacy": spaCy is not installed: pip install spacy, or leave words out'
        ) from error
    try:
        return spacy.blank(language)
    except ImportError as error:
        raise UsageError(f"steps: language = {language!r}: spaCy can't tokenize it ({error})") from error
