"""The rules of C4."""

import re
from dataclasses import replace

from megatfm.config.prep_steps import C4Config
from megatfm.data_prep.counts import Counts
from megatfm.data_prep.documents import Document

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
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
    are no notice about Javascript or cookies; drops pages with lorem ipsum, curly brackets or too few sentences.

    Sentences are counted by their marks; C4 itself used NLTK's Punkt, which knows abbreviations.
    """

    title = "C4"

    def __init__(self, config: C4Config) -> None:
        self._config = config

    def apply(self, document: Document, counts: Counts) -> Document | str:
        text = document.text
        lower = text.lower()
        if "lorem ipsum" in lower:
            return "has lorem ipsum"
        if "{" in text and not self._config.curly_brackets:
            return "has a curly bracket"
        suspicious = [phrase for phrase in ("javascript", *_POLICIES) if phrase in lower]
        lines, sentences = [], 0
        for line in text.split("\n"):
            kept = self._line(line.strip(), suspicious, counts)
            if kept is not None:
                lines.append(kept)
                sentences += len(_SENTENCE.findall(kept))
        if sentences < self._config.min_sentences:
            return "has too few sentences"
        return replace(document, text="\n".join(lines))

    def _line(self, line: str, suspicious: list[str], counts: Counts) -> str | None:
        """The line as it is kept, or None."""
        if not line:
            return None
        words = line.split()
        if len(line) > self._config.max_word_characters and (
            max(map(len, words)) > self._config.max_word_characters
        ):
            counts.meet("lines with an endless word")
            return None
        if "[" in line:
            line = _CITATION.sub("", line)
        if self._config.terminal_punctuation and (not line.endswith(_ENDS) or line.endswith("...")):
            counts.meet("lines that end without punctuation")
            return None
        if len(words) < self._config.min_line_words:
            counts.meet("short lines")
            return None
        if suspicious and any(phrase in line.lower() for phrase in suspicious):
            counts.meet("lines about Javascript or cookies")
            return None
        return line
