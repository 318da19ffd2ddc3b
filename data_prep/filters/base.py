"""Filters: their interface, the counting that all share, filtering by score, and the registry of `[[steps]]`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

from megatfm.config.parts import find_unread_key
from megatfm.config.section import Section
from megatfm.data_prep.documents import Document, StepStats
from megatfm.errors import UsageError
from megatfm.registry import Registry


class Filter(Protocol):
    """Interface of a step: changes or drops a document. Counting is done by CountingFilter."""

    title: str
    """The step's name in tables: words, not an identifier."""

    def __init__(self, config: Any) -> None: ...

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        """Return the document, changed or not, or its drop reason, an identifier such as `gopher_short_doc`.

        counts: takes further findings by `count_event`; documents are counted by CountingFilter.
        """


class CountingFilter:
    """A step of the pipeline: a filter with counts. It drops documents that its filter leaves empty.

    notes: of the filter, for the user.
    """

    def __init__(self, filter_: Filter) -> None:
        self.counts = StepStats(filter_.title)
        self.notes: list[str] = [f"{filter_.title}: {note}" for note in getattr(filter_, "notes", ())]
        self._filter = filter_

    def __call__(self, document: Document) -> Document | None:
        """Return the document, changed or not, or None to drop it."""
        size = document.text_bytes
        self.counts.count_input(size)
        result = self._filter.apply(document, self.counts)
        if not isinstance(result, str) and not result.text.strip():
            result = "empty"
        if isinstance(result, str):
            self.counts.count_dropped(result, size, format_example(document))
            return None
        if result.record != document.record:  # a plugin made a new document
            result = replace(result, record=document.record)
        changed = result.text is not document.text and result.text != document.text
        self.counts.changed += changed
        self.counts.count_kept(result.text_bytes if changed else size)
        return result


def format_example(document: Document, characters: int = 80) -> str:
    """Return a document's source and the beginning of its text, in one line."""
    begin = " ".join(document.text[: 2 * characters].split())
    return f"{document.id}: {begin[:characters]}{'…' if len(begin) > characters else ''}"


class ScoreLimits(Protocol):
    """The part of a step's config with limits of a score, and the field to save it as."""

    @property
    def min_score(self) -> float | None: ...
    @property
    def max_score(self) -> float | None: ...
    @property
    def save_as(self) -> str | None: ...


def filter_by_score(document: Document, score: float, limits: ScoreLimits, subject: str) -> Document | str:
    """Return the document if its score lies within the limits, with the score as field `save_as`; else the drop reason.

    A score that is not a number lies within no limits. An infinite one is stored as a reader stores it, as a text.
    """
    if math.isnan(score):
        return f"{subject}_not_a_number"
    if limits.min_score is not None and score < limits.min_score:
        return f"{subject}_below_min_score"
    if limits.max_score is not None and score > limits.max_score:
        return f"{subject}_above_max_score"
    if limits.save_as is None:
        return document
    value = round(score, 6) if math.isfinite(score) else "Infinity" if score > 0 else "-Infinity"
    return replace(document, fields={**document.fields, limits.save_as: value})


def count_score(counts: StepStats, score: float) -> None:
    """Count a probability in tenths, as a histogram for the report. NaN is none of them: its document is dropped."""
    if math.isnan(score):
        return
    tenth = min(int(score * 10), 9)
    counts.count_event(f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}")


STEPS: Registry[type[Filter]] = Registry("cleaning step")
"""Name → constructor `step(config)`, with a table of `[[steps]]`; `apply(document, counts)` runs on each document."""

# Imported when a config names one of its filters, since their libraries are large or optional.
_MODULES: dict[str, tuple[str, ...]] = {
    "text": ("normalize", "html", "language"),
    "heuristics": ("gopher_quality", "c4", "fineweb"),
    "repetition": ("gopher_repetition",),
    "selection": ("url_filter", "c4_badwords", "decontaminate", "metadata_filter", "sample"),
    "pii": ("pii", "presidio"),
    "classifiers": ("linear_classifier", "fasttext"),
    "models": ("classifier", "perplexity"),
}
"""Modules of this package, and the filters that each registers."""


def make_filter(config: Section) -> CountingFilter:
    """Make the filter of a `[[steps]]` table. Raises UsageError for an unusable list or file, or an unread key."""
    name: str = getattr(config, "name")  # noqa: B009 (all sections of steps have one)
    for module, names in _MODULES.items():
        if name in names:
            import_module(f"megatfm.data_prep.filters.{module}")
    step = CountingFilter(STEPS.get(name)(config))
    if error := find_unread_key(config, "steps: "):
        raise UsageError(error)
    return step


def pass_through(steps: Sequence[CountingFilter], documents: Iterable[Document]) -> Iterator[Document]:
    """Apply the steps in order, and yield the documents that all of them keep."""
    for document in documents:
        result: Document | None = document
        for step in steps:
            if result is not None:
                result = step(result)
        if result is not None:
            yield result
