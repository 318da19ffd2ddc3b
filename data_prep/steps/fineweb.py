"""The rules of FineWeb."""

from megatfm.config.prep_steps import FineWebConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.punctuation import SENTENCE_ENDS
from megatfm.data_prep.steps.repetition import repeated
from megatfm.data_prep.steps.split_words import word_tokenizer

# With the quotation marks that the code had which made FineWeb; datatrove has dropped them since, and added all others.
_ENDS = SENTENCE_ENDS | {'"', "'"}


class FineWeb:
    """Drops pages of fragments (Penedo et al. 2024, section 3.6): few lines that end with punctuation, many short
    or repeated lines, lists."""

    title = "FineWeb"

    def __init__(self, config: FineWebConfig) -> None:
        self._config = config
        self._words = word_tokenizer(config)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        return self._fault(document.text) or document

    def _fault(self, text: str) -> str | None:
        limits = self._config
        lines = [line for line in text.split("\n") if line.strip()]
        if sum(line[-1] in _ENDS for line in lines) < limits.min_punctuated_lines * len(lines):
            return "has few lines that end with punctuation"
        if sum(len(line) <= limits.short_line for line in lines) > limits.max_short_lines * len(lines):
            return "has many short lines"
        breaks = text.count("\n")
        _, length = repeated(lines)
        if length > limits.max_repeated_characters * (len(text) - breaks):
            return "has much text in repeated lines"
        if breaks > limits.max_lines_per_word * len(self._words(text)):
            return "is a list"
        return None
