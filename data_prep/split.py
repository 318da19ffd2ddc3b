"""Hold documents out for validation: whole top-level packages, and nothing nearly the same left in training."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3
from rensa import RMinHash, RMinHashLSH

from data_prep.counts import Counts
from data_prep.documents import Document
from megatfm.config.prep import NearDuplicatesConfig

PERMUTATIONS = 128
# 32 bands of 4: two documents with similarity 0.6 meet in some band in 98.8 % of cases, with 0.7 in 99.98 %.
BANDS = 32
_WORD = re.compile(r"\w+")

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


def plan_split(documents: Iterable[Document], share: float, seed: int) -> Split | None:
    """The split of a corpus at the first level at which `share` can be met; None if there is none."""
    sizes: dict[str, Counter[str]] = {level: Counter() for level in LEVELS}
    for document in documents:
        for level, name in LEVELS.items():
            sizes[level][name(document)] += document.text_bytes
    for level in LEVELS:
        if held_out := choose(sizes[level], share, seed):
            return Split(level, held_out)
    return None


class NearDuplicates:
    """Drops training documents that are nearly the same as a held-out one.

    They are dropped from training and not from validation, so that what is held out depends on names alone: the
    yardstick stays the same when the training data grows. It also keeps the index as small as the smaller side.
    """

    def __init__(self, config: NearDuplicatesConfig) -> None:
        self.counts = Counts("near duplicates")
        self._similarity = config.similarity
        self._words = config.shingle_words
        self._index = RMinHashLSH(threshold=config.similarity, num_perm=PERMUTATIONS, num_bands=BANDS)
        self._held_out: list[tuple[str, RMinHash]] = []

    def hold_out(self, document: Document) -> None:
        """Remember a document of the validation split."""
        signature = self._signature(document.text)
        self._index.insert(len(self._held_out), signature)
        self._held_out.append((document.source, signature))

    def __call__(self, document: Document) -> Document | None:
        self.counts.take(document.text_bytes)
        signature = self._signature(document.text)
        for candidate in sorted(self._index.query(signature)):
            source, held_out = self._held_out[candidate]
            similarity = signature.jaccard(held_out)
            if similarity >= self._similarity:
                example = f"{document.source} ~ {source} ({similarity:.2f})"
                self.counts.drop("near a validation document", document.text_bytes, example)
                return None
        self.counts.keep(document.text_bytes)
        return document

    def _signature(self, text: str) -> RMinHash:
        """MinHash of the text's shingles: runs of words; all of them, or the text itself, if they are few."""
        words = _WORD.findall(text.lower())
        shingles = [
            " ".join(words[at : at + self._words]) for at in range(max(1, len(words) - self._words + 1))
        ]
        signature = RMinHash(num_perm=PERMUTATIONS, seed=0)
        signature.update(shingles if words else [text.strip()])
        return signature
