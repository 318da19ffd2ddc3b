"""What is looked for in the whole corpus: repeated lines, paragraphs and runs, and documents that are alike.

Each search has three stages. Every part is *scanned* into rows of numbers, the rows to remove are *found* and marked
(see `later.py` and `alike.py`), and every part is *thinned* by the marks of its rows. All of it is tasks over files.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import DuplicatesConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.index import DedupContext, Facts, KeyTable, RunTasks
from megatfm.data_prep.duplicates.near import MinhashDedup
from megatfm.data_prep.duplicates.pieces import LineDedup, ParagraphDedup
from megatfm.data_prep.duplicates.substrings import SubstringDedup

__all__ = ["DEDUP_METHODS", "DedupContext", "DedupMethod", "KeyTable", "RunTasks", "make"]


class DedupMethod(Protocol):
    """One kind of duplicates. The result is the same however the corpus is cut into parts."""

    title: str
    row: tuple[str, int]
    """What a row is: the type of its numbers, and how many there are."""

    def __init__(self, config: Any) -> None: ...

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        """The rows of a part, in its order, a few documents at a time."""
        ...

    def find_duplicates(self, rows: KeyTable, index: DedupContext) -> Facts:
        """Mark the rows of all parts that go, as `index.marks`. Returns `each`, the rows of a file of marks."""
        ...

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        """What is left of the documents of a part, given the marks of its rows."""
        ...


DEDUP_METHODS: dict[str, type[DedupMethod]] = {
    "lines": LineDedup,
    "paragraphs": ParagraphDedup,
    "near": MinhashDedup,
    "substrings": SubstringDedup,
}


def make(config: DuplicatesConfig) -> DedupMethod:
    """The search that a table of `[[duplicates]]` asks for."""
    return DEDUP_METHODS[config.name](config)
