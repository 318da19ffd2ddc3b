"""Identical texts, anywhere in the corpus."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.index import DedupContext, Facts, KeyTable
from megatfm.data_prep.duplicates.later import mark_repeats


class ExactDedup:
    """Keeps the first of identical texts. A row is the first 16 bytes of the BLAKE3 hash of a text."""

    title = "exact duplicates"
    row = ("<u8", 2)
    reason = "same text"

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for document in documents:
            yield np.frombuffer(blake3(document.text.encode()).digest(16), "<u8")[None]

    def find_duplicates(self, rows: KeyTable, index: DedupContext) -> Facts:
        """Also some `examples`: [row, first row with the same text]."""
        return mark_repeats(rows, index)

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        for document, is_later in zip(documents, marks.tolist(), strict=True):
            counts.count_input(document.text_bytes)
            if is_later:
                counts.count_dropped(self.reason, document.text_bytes, document.id)
                continue
            counts.count_kept(document.text_bytes)
            yield document
