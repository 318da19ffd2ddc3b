"""What a step did to the documents that passed through it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

EXAMPLES = 10


@dataclass
class Dropped:
    """Documents dropped for one reason, with the first few as examples."""

    documents: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class StepStats:
    """Documents and UTF-8 bytes of text that a step took in, changed, dropped and passed on."""

    step: str
    documents_in: int = 0
    bytes_in: int = 0
    changed: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    """How often it met what it looks for: languages, redactions, removed lines."""

    def count_event(self, what: str, times: int = 1) -> None:
        """Count a finding, such as a redaction: it may happen several times in one document."""
        self.found[what] = self.found.get(what, 0) + times

    def count_input(self, size: int) -> None:
        """Count a document that comes in; size: UTF-8 bytes of its text."""
        self.documents_in += 1
        self.bytes_in += size

    def count_kept(self, size: int) -> None:
        """Count a document that is passed on; size: UTF-8 bytes of its text, as it is now."""
        self.documents_out += 1
        self.bytes_out += size

    def count_dropped(self, reason: str, size: int, example: str) -> None:
        """Count a document as dropped, by reason; size: UTF-8 bytes; of the examples only the first few are kept."""
        dropped = self.dropped.setdefault(reason, Dropped())
        dropped.documents += 1
        dropped.bytes += size
        if len(dropped.examples) < EXAMPLES:
            dropped.examples.append(example)

    @classmethod
    def merge(cls, parts: Sequence[Mapping[str, Any]]) -> Self:
        """The counts of all parts of a corpus, given as JSON in the order of the corpus."""
        whole = cls(parts[0]["step"])
        for part in parts:
            for name in ("documents_in", "bytes_in", "changed", "documents_out", "bytes_out"):
                setattr(whole, name, getattr(whole, name) + part[name])
            for reason, dropped in part["dropped"].items():
                total = whole.dropped.setdefault(reason, Dropped())
                total.documents += dropped["documents"]
                total.bytes += dropped["bytes"]
                total.examples = [*total.examples, *dropped["examples"]][:EXAMPLES]
            for what, times in part.get("found", {}).items():
                whole.count_event(what, times)
        return whole

    def as_json(self) -> dict[str, Any]:
        """Fields by name, of which `found` is left out where nothing was."""
        values = asdict(self)
        if not self.found:
            del values["found"]
        return values


def format_drop_reasons(counts: Iterable[StepStats]) -> str:
    """Why documents were dropped, in one line."""
    reasons = [
        f"{dropped.documents} dropped, as each {reason}"
        for each in counts
        for reason, dropped in each.dropped.items()
    ]
    return "; ".join(reasons) or "there were none"
