"""What steps share that have a model say a number of a document."""

from dataclasses import replace
from typing import Protocol

from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document


class ScoreLimits(Protocol):
    """The part of a step's config that says what its number is for."""

    @property
    def at_least(self) -> float | None: ...
    @property
    def at_most(self) -> float | None: ...
    @property
    def field(self) -> str | None: ...


def filter_by_score(document: Document, score: float, limits: ScoreLimits, what: str) -> Document | str:
    """The document if its score lies within the limits, with the score as a field if one is named; else why not."""
    if limits.at_least is not None and score < limits.at_least:
        return f"has too low a {what}"
    if limits.at_most is not None and score > limits.at_most:
        return f"has too high a {what}"
    if limits.field is None:
        return document
    return replace(document, fields={**document.fields, limits.field: round(score, 6)})


def count_score(counts: StepStats, score: float) -> None:
    """Count a probability by tenths, so that the report shows where to cut."""
    tenth = min(int(score * 10), 9)
    counts.count_event(f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}")
