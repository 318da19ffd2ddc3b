"""What is looked for in the whole corpus: repeated lines, paragraphs and runs, and documents that are alike.

Each search has three stages. Every part is *scanned* into rows of numbers, one process *decides* over the rows of all
parts what goes, and every part is *thinned* by what was decided for its rows. Rows and decisions lie on disk.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.counts import Counts
from data_prep.documents import Document
from data_prep.duplicates.index import Rows
from data_prep.duplicates.near import Near
from data_prep.duplicates.pieces import Lines, Paragraphs
from data_prep.duplicates.substrings import Substrings
from megatfm.config.prep_steps import DuplicatesConfig

__all__ = ["SEARCHES", "Rows", "Search", "make"]


class Search(Protocol):
    """One kind of duplicates. The result is the same however the corpus is cut into parts."""

    title: str
    row: tuple[str, int]
    """What a row is: the type of its numbers, and how many there are."""

    def __init__(self, config: Any) -> None: ...

    def scan(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        """The rows of a part, in its order, a few documents at a time."""
        ...

    def decide(self, rows: Rows, decision: Path, memory_bytes: int) -> None:
        """Write to a file a number for each row of all parts, given about so much memory to work in."""
        ...

    def thin(
        self, documents: Iterable[Document], first: int, decision: NDArray[Any], counts: Counts
    ) -> Iterator[Document]:
        """What is left of the documents of a part, given the decision for its rows, which begin with row `first`."""
        ...


SEARCHES: dict[str, type[Search]] = {
    "lines": Lines,
    "paragraphs": Paragraphs,
    "near": Near,
    "substrings": Substrings,
}


def make(config: DuplicatesConfig) -> Search:
    """The search that a table of `[[duplicates]]` asks for."""
    return SEARCHES[config.name](config)


def load_decision(path: Path) -> NDArray[Any]:
    """What was decided, without reading it into memory."""
    decision: NDArray[Any] = np.load(path, mmap_mode="r")
    return decision
