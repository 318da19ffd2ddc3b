"""Which documents are held out for validation: whole top-level packages, if there are enough."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from megatfm.data_prep.documents import Document

LEVELS: Mapping[str, Callable[[Document], str]] = {
    "top-level package": lambda document: document.top_level,
    "file": lambda document: document.file,
    "record": lambda document: document.unit,
    "part of a file": lambda document: document.id,
}
"""Units that a split keeps together, from the best protection against leaks to the least: none at all, between the
parts of one text."""
OF_FILES, OF_DOCUMENTS = (*LEVELS,)[:2], (*LEVELS,)[2:]
"""The levels that names of files tell, and those for which documents must be looked at."""


@dataclass(frozen=True)
class Split:
    """The level at which a corpus is split, and the names held out there; or of very many names those whose hash, the
    first two bytes of it, is less than `below`."""

    level: str
    held_out: frozenset[str]
    below: int = 0
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.held_out) or self.below > 0

    def holds_out(self, document: Document) -> bool:
        """Whether a document is for validation, as all are that share its name at the level."""
        if self.below:
            return _bin(LEVELS[self.level](document), self.seed) < self.below
        return bool(self.held_out) and LEVELS[self.level](document) in self.held_out


def _digest(name: str, seed: int) -> bytes:
    return blake3(f"{seed}:{name}".encode()).digest()


def _bin(name: str, seed: int) -> int:
    return int.from_bytes(_digest(name, seed)[:2], "big")


def choose_held_out(sizes: Mapping[str, int], share: float, seed: int) -> frozenset[str]:
    """Names to hold out, given the bytes of each: at most `share` of all bytes, at least half of that, or none.

    Names come in the order of a hash of (seed, name), so that a new one disturbs the others little; one that
    is too large for what is left is passed over.
    """
    most = share * sum(sizes.values())
    left = most
    held_out = set()
    for name in sorted(sizes, key=lambda name: _digest(name, seed)):
        if sizes[name] <= left:
            held_out.add(name)
            left -= sizes[name]
    return frozenset(held_out) if most and left <= most / 2 else frozenset()


def plan_split(files: Mapping[str, int], share: float, seed: int) -> Split | None:
    """The split of a corpus, given the bytes of each file, at the first level at which `share` can be met; None if that
    needs documents."""
    for level in OF_FILES:
        sizes: Counter[str] = Counter()
        for file, size in files.items():
            sizes[LEVELS[level](Document(file, ""))] += size
        if held_out := choose_held_out(sizes, share, seed):
            return Split(level, held_out)
    return None


def plan_parts_of_files(sizes: Mapping[str, Mapping[str, int]], share: float, seed: int) -> Split | None:
    """The split of documents, given by level the bytes of each name; None if there are too few."""
    for level in OF_DOCUMENTS:
        if held_out := choose_held_out(sizes[level], share, seed):
            return Split(level, held_out)
    return None


def plan_by_hash(
    parts: Iterable[Mapping[str, Mapping[str, int]]], level: str, share: float, seed: int
) -> Split | None:
    """The split of more documents than a process could hold the names of, given of each part by level the bytes of each
    name: those of the lowest hashes, at most `share` of all bytes and at least half of that; None if there is none."""
    bins = np.zeros(2**16, np.int64)
    for part in parts:
        for name, size in part[level].items():
            bins[_bin(name, seed)] += size
    sums, most = np.cumsum(bins), share * int(bins.sum())
    below = int(np.searchsorted(sums, most, "right"))
    fits = below > 0 and most > 0 and 2 * int(sums[below - 1]) >= most
    return Split(level, frozenset(), below, seed) if fits else None
