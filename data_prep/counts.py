"""What a step did to the documents that passed through it."""

from dataclasses import asdict, dataclass, field
from typing import Any

EXAMPLES = 10


@dataclass
class Dropped:
    """Documents dropped for one reason, with the first few as examples."""

    documents: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Counts:
    """Documents and UTF-8 bytes of text that a step took in, changed, dropped and passed on."""

    step: str
    documents_in: int = 0
    bytes_in: int = 0
    changed: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def take(self, size: int) -> None:
        self.documents_in += 1
        self.bytes_in += size

    def keep(self, size: int) -> None:
        self.documents_out += 1
        self.bytes_out += size

    def drop(self, reason: str, size: int, example: str) -> None:
        dropped = self.dropped.setdefault(reason, Dropped())
        dropped.documents += 1
        dropped.bytes += size
        if len(dropped.examples) < EXAMPLES:
            dropped.examples.append(example)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
