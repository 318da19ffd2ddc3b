"""Quality filters by rules: C4, Gopher, FineWeb; Gopher's rules of repetition are in `repetition.py`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatfm.config.prep_steps import C4Config, FineWebConfig, GopherQualityConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS
from megatfm.errors import UsageError

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE = re.compile(r"(?<![.!?])[.!?]+[\"')\]]*(?=\s|$)")  # the lookbehind keeps runs of dots linear
_LINE_ENDS = (".", "?", "!", '"')
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@STEPS.register("c4")
class C4:
    """Keeps sentences (Raffel et al. 2020, section 2.2).

    Lines must end with a punctuation mark, have enough words, and be no notice about Javascript or cookies. Pages with
    lorem ipsum or a curly bracket in such a line, or with too few sentences, are dropped. Details that the paper leaves
    open are those of C4's code (tensorflow_datasets, text/c4_utils.py): the order of the rules, words without
    citations, no apostrophe as an end. Sentences are counted by their marks; C4 used NLTK's Punkt, which knows
    abbreviations.
    """

    title = "C4"

    def __init__(self, config: C4Config) -> None:
        self._config = config

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        lower = document.text.lower()
        policies = [phrase for phrase in _POLICIES if phrase in lower]
        has_script, has_lorem = "javascript" in lower, "lorem ipsum" in lower
        lines, sentences = [], 0
        for raw_line in document.text.splitlines():
            line = self._clean_sentence(raw_line.strip(), counts)
            if line is None:
                continue
            lower_line = line.lower() if policies or has_script or has_lorem else ""
            if "lorem ipsum" in lower_line:
                return "lorem_ipsum"
            is_script = "javascript" in lower_line
            if "{" in line and not is_script and self._config.filter_curly_bracket:
                return "curly_bracket"
            if is_script or any(phrase in lower_line for phrase in policies):
                counts.count_event("line_filter_javascript" if is_script else "line_filter_policy")
                continue
            lines.append(line)
            sentences += len(_SENTENCE.findall(line))
        if sentences < self._config.min_num_sentences:
            return "too_few_sentences"
        return replace(document, text="\n".join(lines).strip())

    def _clean_sentence(self, line: str, counts: StepStats) -> str | None:
        """Return the line without citations; None if it is no sentence: by its end, number and length of words."""
        if not line:
            return None
        max_length = self._config.max_word_length
        if len(line) > max_length and max(map(len, line.split())) > max_length:
            counts.count_event("line_filter_too_long_word")
            return None
        if "[" in line:
            line = _CITATION.sub("", line)
        if self._config.filter_no_terminal_punct and (not line.endswith(_LINE_ENDS) or line.endswith("...")):
            counts.count_event("line_filter_no_terminal_punct")
            return None
        if len(line.split()) < self._config.min_words_per_line:
            counts.count_event("line_filter_too_few_words")
            return None
        return line


class WordTokenizerConfig(Protocol):
    """The part of a step's config with its word tokenizer."""

    @property
    def word_tokenizer(self) -> str: ...
    @property
    def language(self) -> str: ...


def make_word_tokenizer(config: WordTokenizerConfig) -> Callable[[str], list[str]]:
    """Return the function from a text to its words. Raises UsageError if spaCy or its language is missing."""
    return str.split if config.word_tokenizer == "space" else _SpacyWords(config.language)


class _SpacyWords:
    """spaCy's rule-based tokenizer of a language, without white space tokens."""

    def __init__(self, language: str) -> None:
        self._tokenizer: Any = _make_spacy_tokenizer(language)

    def __call__(self, text: str) -> list[str]:
        with self._tokenizer.memory_zone():
            self._tokenizer.max_length = len(text) + 10
            return [word for token in self._tokenizer.make_doc(text) if (word := token.text.strip())]


def _make_spacy_tokenizer(language: str) -> Any:
    try:
        import spacy
    except ImportError as error:
        raise UsageError(
            'steps: word_tokenizer = "spacy": spaCy is not installed: pip install spacy, or leave it out'
        ) from error
    try:
        return spacy.blank(language)
    except ImportError as error:
        raise UsageError(f"steps: language = {language!r}: spaCy can't tokenize it ({error})") from error


_BULLETS = ("•", "‣", "◦", "⁃", "∙", "·", "-", "*")
_ELLIPSES = ("...", "…")
_LINES = re.compile(r"\n+")


class RuleFilter:
    """Base of filters that drop a document by rules of its text, or leave it as it is."""

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        """Return the document, or the rule that it breaks."""
        return self._drop_reason(document.text) or document

    def _drop_reason(self, text: str) -> str | None:
        raise NotImplementedError


@STEPS.register("gopher_quality")
class GopherQuality(RuleFilter):
    """Drops documents unlike prose (Rae et al. 2021, appendix A.1.1).

    The rules: lengths of documents and words, symbols, bullets, lines that end in an ellipsis, words without letters,
    and too few stop words.
    """

    title = "Gopher quality"

    def __init__(self, config: GopherQualityConfig) -> None:
        self._config, self._words = config, make_word_tokenizer(config)
        self._stop_words = frozenset(config.stop_words)

    def _drop_reason(self, text: str) -> str | None:
        limits, words = self._config, self._words(text)
        if len(words) < limits.min_doc_words:
            return "gopher_short_doc"
        if len(words) > limits.max_doc_words:
            return "gopher_long_doc"
        count = max(1, len(words))
        mean = sum(map(len, words)) / count
        if mean < limits.min_avg_word_length:
            return "gopher_below_avg_threshold"
        if mean > limits.max_avg_word_length:
            return "gopher_above_avg_threshold"
        if text.count("#") > limits.max_symbol_word_ratio * count:
            return "gopher_too_many_hashes"
        if sum(map(text.count, _ELLIPSES)) > limits.max_symbol_word_ratio * count:
            return "gopher_too_many_ellipsis"
        lines = [line.strip() for line in _LINES.split(text)]
        if sum(line.startswith(_BULLETS) for line in lines) > limits.max_bullet_lines_ratio * len(lines):
            return "gopher_too_many_bullets"
        if sum(line.endswith(_ELLIPSES) for line in lines) > limits.max_ellipsis_lines_ratio * len(lines):
            return "gopher_too_many_end_ellipsis"
        letters = sum(1 for word in words if word.isalpha() or any(map(str.isalpha, word)))
        if letters < limits.min_alpha_words_ratio * count:
            return "gopher_below_alpha_threshold"
        if len(self._stop_words.intersection(words)) < limits.min_stop_words:
            return "gopher_enough_stop_words"
        return None


# The characters of datatrove (`utils/text.py`), nearly all of Unicode's Sentence_Terminal.
SENTENCE_ENDS = frozenset(
    "!.?։؝؞؟۔܀܁܂߹࠷࠹࠽࠾।॥၊။።፧፨᙮᜵᜶។៕៖៙៚᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿‼‽⁇⁈⁉⸮⸼⹓⹔。꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫﹒﹖﹗！．？｡\U00010a56"
    "\U00010a57\U00010f55\U00010f56\U00010f57\U00010f58\U00010f59\U00010f86\U00010f87\U00010f88\U00010f89"
    "\U00011047\U00011048\U000110be\U000110bf\U000110c0\U000110c1\U00011141\U00011142\U00011143\U000111c5"
    "\U000111c6\U000111cd\U000111de\U000111df\U00011238\U00011239\U0001123b\U0001123c\U000112a9\U0001144b"
    "\U0001144c\U000115c2\U000115c3\U000115c9\U000115ca\U000115cb\U000115cc\U000115cd\U000115ce\U000115cf"
    "\U000115d0\U000115d1\U000115d2\U000115d3\U000115d4\U000115d5\U000115d6\U000115d7\U00011641\U00011642"
    "\U0001173c\U0001173d\U0001173e\U00011944\U00011946\U00011a42\U00011a43\U00011a9b\U00011a9c\U00011c41"
    "\U00011c42\U00011ef7\U00011ef8\U00011f43\U00011f44\U00016a6e\U00016a6f\U00016af5\U00016b37\U00016b38"
    "\U00016b44\U00016e98\U0001bc9f\U0001da88"
)

# With the quotation marks that the code had which made FineWeb; datatrove has dropped them since, and added all others.
_PUNCTUATION = SENTENCE_ENDS | {'"', "'"}


@STEPS.register("fineweb")
class FineWeb(RuleFilter):
    """Drops fragmented pages (Penedo et al. 2024, section 3.6).

    The rules: few lines that end with punctuation, many short or repeated lines, and lists.
    """

    title = "FineWeb"

    def __init__(self, config: FineWebConfig) -> None:
        self._config, self._words = config, make_word_tokenizer(config)

    def _drop_reason(self, text: str) -> str | None:
        limits = self._config
        lines = [line for line in text.split("\n") if line.strip()]
        if sum(line[-1] in _PUNCTUATION for line in lines) < limits.line_punct_thr * len(lines):
            return "line_punct_ratio"
        if sum(len(line) <= limits.short_line_length for line in lines) > limits.short_line_thr * len(lines):
            return "short_line_ratio"
        breaks = text.count("\n")
        _, length = count_repeated(lines)
        if length > limits.char_duplicates_ratio * (len(text) - breaks):
            return "char_dup_ratio"
        if breaks > limits.new_line_ratio * len(self._words(text)):
            return "list_ratio"
        return None


def count_repeated(units: Sequence[str]) -> tuple[int, int]:
    """Return the number of repeated units, lines or paragraphs, and their characters."""
    if len(units) == len(set(units)):
        return 0, 0
    known_units: set[str] = set()
    n_repeated = n_characters = 0
    for unit in units:
        if unit in known_units:
            n_repeated, n_characters = n_repeated + 1, n_characters + len(unit)
        known_units.add(unit)
    return n_repeated, n_characters
