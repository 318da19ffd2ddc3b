"""The rules of C4."""

import re
from dataclasses import replace

from megatfm.config.prep_steps import C4Config
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE = re.compile(r"(?<![.!?])[.!?]+[\"')\]]*(?=\s|$)")  # looks at a run of dots but once
_ENDS = (".", "?", "!", '"')
_POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


class C4:
    """Keeps sentences (Raffel et al. 2020, section 2.2): lines that end with a punctuation mark, have enough words,
    are no notice about Javascript or cookies; drops pages that have lorem ipsum or a curly bracket in a line that ends
    so, or too few sentences.

    What the paper leaves open is as in the code that made C4 (tensorflow_datasets, text/c4_utils.py): the order of the
    rules, words counted without citations, no apostrophe as an end. Sentences are counted by their marks; C4 itself
    used NLTK's Punkt, which knows abbreviations.
    """

    title = "C4"

    def __init__(self, config: C4Config) -> None:
        self._config = config

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        lower = document.text.lower()
        policies = [phrase for phrase in _POLICIES if phrase in lower]
        has_script, has_lorem = "javascript" in lower, "lorem ipsum" in lower
        lines, sentences = [], 0
        for whole in document.text.splitlines():
            line = self._sentence(whole.strip(), counts)
            if line is None:
                continue
            lower = line.lower() if policies or has_script or has_lorem else ""
            if "lorem ipsum" in lower:
                return "has lorem ipsum"
            is_script = "javascript" in lower
            if "{" in line and not is_script and not self._config.curly_brackets:
                return "has a curly bracket"
            if is_script or any(phrase in lower for phrase in policies):
                counts.count_event("lines about Javascript or cookies")
                continue
            lines.append(line)
            sentences += len(_SENTENCE.findall(line))
        if sentences < self._config.min_sentences:
            return "has too few sentences"
        return replace(document, text="\n".join(lines).strip())

    def _sentence(self, line: str, counts: StepStats) -> str | None:
        """The line without citations, or None unless it ends like a sentence and has enough words, none endless."""
        if not line:
            return None
        most = self._config.max_word_characters
        if len(line) > most and max(map(len, line.split())) > most:
            counts.count_event("lines with an endless word")
            return None
        if "[" in line:
            line = _CITATION.sub("", line)
        if self._config.terminal_punctuation and (not line.endswith(_ENDS) or line.endswith("...")):
            counts.count_event("lines that end without punctuation")
            return None
        if len(line.split()) < self._config.min_line_words:
            counts.count_event("short lines")
            return None
        return line
