"""What a step is, and the counting that all steps share."""

from dataclasses import replace
from typing import Any, Protocol

from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document


class PipelineStep(Protocol):
    """One step of the pipeline."""

    counts: StepStats

    def __call__(self, document: Document) -> Document | None:
        """The document, changed or not, or None to drop it."""


class Filter(Protocol):
    """What a step does with a document, without the counting."""

    title: str
    """The step's name in tables: words, not an identifier."""

    def __init__(self, config: Any) -> None: ...

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        """The document, changed or not, or why it is dropped, as what follows "is" or "has": `is too short`.

        It may tell `counts` of what it met; the documents themselves are counted by others.
        """


class CountingFilter:
    """A rule as a step. A text that a rule leaves empty is dropped. What a rule's `notes` say is for the user."""

    def __init__(self, rule: Filter) -> None:
        self.counts = StepStats(rule.title)
        self.notes: list[str] = [f"{rule.title}: {note}" for note in getattr(rule, "notes", ())]
        self._rule = rule

    def __call__(self, document: Document) -> Document | None:
        size = document.text_bytes
        self.counts.count_input(size)
        result = self._rule.apply(document, self.counts)
        if not isinstance(result, str) and not result.text.strip():
            result = "has nothing left"
        if isinstance(result, str):
            self.counts.count_dropped(result, size, example(document))
            return None
        if result.record != document.record:  # a plugin made a document of its own
            result = replace(result, record=document.record)
        changed = result.text is not document.text and result.text != document.text
        self.counts.changed += changed
        self.counts.count_kept(result.text_bytes if changed else size)
        return result


def example(document: Document, characters: int = 80) -> str:
    """Where a document is from, and how it begins, in one line."""
    begin = " ".join(document.text[: 2 * characters].split())
    return f"{document.id}: {begin[:characters]}{'…' if len(begin) > characters else ''}"
