"""What is looked for in the whole corpus: repeated lines, paragraphs and runs, and documents that are alike.

Each search has three stages. Every part is *scanned* into rows of numbers, the rows to remove are *found* and marked
(see `later.py` and `alike.py`), and every part is *thinned* by the marks of its rows. All of it is tasks over files.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import DuplicatesConfig
from megatfm.data_prep.counts import Counts
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.index import Facts, Index, Rows, RunTasks
from megatfm.data_prep.duplicates.near import Near
from megatfm.data_prep.duplicates.pieces import Lines, Paragraphs
from megatfm.data_prep.duplicates.substrings import Substrings

__all__ = ["SEARCHES", "Index", "Rows", "RunTasks", "Search", "make"]


class Search(Protocol):
    """One kind of duplicates. The result is the same however the corpus is cut into parts."""

    title: str
    row: tuple[str, int]
    """What a row is: the type of its numbers, and how many there are."""

    def __init__(self, config: Any) -> None: ...

    def scan(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        """The rows of a part, in its order, a few documents at a time."""
        ...

    def find(self, rows: Rows, index: Index) -> Facts:
        """Mark the rows of all parts that go, as `index.marks`. Returns `each`, the rows of a file of marks."""
        ...

    def thin(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: Counts
    ) -> Iterator[Document]:
        """What is left of the documents of a part, given the marks of its rows."""
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
