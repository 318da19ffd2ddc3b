"""Documents that are nearly the same, anywhere in the corpus."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import MinHashConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.alike import mark_near_duplicates
from megatfm.data_prep.duplicates.index import DedupContext, Facts, KeyTable
from megatfm.data_prep.minhash import with_signatures
from megatfm.data_prep.steps.rule import example


class MinhashDedup:
    """Keeps the first of documents that are near to each other, directly or through others.

    Two documents are near if they agree in all rows of a band of their MinHash signatures and the whole signatures
    give a Jaccard similarity of at least `similarity`. A row is a signature.
    """

    title = "near duplicates of each other"

    def __init__(self, config: MinHashConfig) -> None:
        self._config = config
        self._hashes = config.bands * config.rows
        self.row = ("<u4", self._hashes)

    def compute_keys(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for _, signs in with_signatures(documents, self._config.shingle_words, self._hashes):
            yield signs

    def find_duplicates(self, rows: KeyTable, index: DedupContext) -> Facts:
        return mark_near_duplicates(rows, index, self._config.bands, self._config.similarity)

    def remove_duplicates(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: StepStats
    ) -> Iterator[Document]:
        for document, is_near in zip(documents, marks.tolist(), strict=True):
            counts.count_input(document.text_bytes)
            if is_near:
                counts.count_dropped("near an earlier document", document.text_bytes, example(document))
                continue
            counts.count_kept(document.text_bytes)
            yield document
