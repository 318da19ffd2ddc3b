"""Documents that are nearly the same, anywhere in the corpus."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import AlikeConfig
from megatfm.data_prep.counts import Counts
from megatfm.data_prep.documents import Document
from megatfm.data_prep.duplicates.alike import mark_alike
from megatfm.data_prep.duplicates.index import Facts, Index, Rows
from megatfm.data_prep.minhash import signed
from megatfm.data_prep.steps.rule import example


class Near:
    """Keeps the first of documents that are near to each other, directly or through others.

    Two documents are near if they agree in all rows of a band of their MinHash signatures and the whole signatures
    give a Jaccard similarity of at least `similarity`. A row is a signature.
    """

    title = "near duplicates of each other"

    def __init__(self, config: AlikeConfig) -> None:
        self._config = config
        self._hashes = config.bands * config.rows
        self.row = ("<u4", self._hashes)

    def scan(self, documents: Iterable[Document]) -> Iterator[NDArray[Any]]:
        for _, signs in signed(documents, self._config.shingle_words, self._hashes):
            yield signs

    def find(self, rows: Rows, index: Index) -> Facts:
        return mark_alike(rows, index, self._config.bands, self._config.similarity)

    def thin(
        self, documents: Iterable[Document], marks: NDArray[np.uint8], counts: Counts
    ) -> Iterator[Document]:
        for document, is_near in zip(documents, marks.tolist(), strict=True):
            counts.take(document.text_bytes)
            if is_near:
                counts.drop("near an earlier document", document.text_bytes, example(document))
                continue
            counts.keep(document.text_bytes)
            yield document
