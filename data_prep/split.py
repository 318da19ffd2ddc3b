"""Which documents are held out for validation: whole top-level packages, if there are enough."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from data_prep.documents import Document

LEVELS: Mapping[str, Callable[[Document], str]] = {
    "top-level package": lambda document: document.entry,
    "file": lambda document: document.file,
    "part of a file": lambda document: document.source,
}
"""What is kept together, from the best protection against leaks to the least."""


@dataclass(frozen=True)
class Split:
    """The level at which a corpus is split, and the names held out there."""

    level: str
    held_out: frozenset[str]

    def holds_out(self, document: Document) -> bool:
        return LEVELS[self.level](document) in self.held_out


def choose(sizes: Mapping[str, int], share: float, seed: int) -> frozenset[str]:
    """Names to hold out, given the bytes of each: at most `share` of all bytes, at least half of that, or none.

    Names come in the order of a hash of (seed, name), so that a new one disturbs the others little; one that
    is too large for what is left is passed over.
    """
    most = share * sum(sizes.values())
    left = most
    held_out = set()
    for name in sorted(sizes, key=lambda name: blake3(f"{seed}:{name}".encode()).digest()):
        if sizes[name] <= left:
            held_out.add(name)
            left -= sizes[name]
    return frozenset(held_out) if most and left <= most / 2 else frozenset()


def plan_split(read: Callable[[], Iterable[Document]], share: float, seed: int) -> Split | None:
    """The split of a corpus at the first level at which `share` can be met; None if there is none.

    The documents are read again for each level, so that the names of a finer one, which may be many, are in memory
    only if they are needed.
    """
    for level, name in LEVELS.items():
        sizes: Counter[str] = Counter()
        for document in read():
            sizes[name(document)] += document.text_bytes
        if held_out := choose(sizes, share, seed):
            return Split(level, held_out)
    return None
