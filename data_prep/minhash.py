"""MinHash signatures of many texts at once (Broder 1997): shingles by numpy, their hashes' minima by rensa."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from megatfm.data_prep.documents import Document
from megatfm.data_prep.words import Hashes, ngram_hashes, splitmix64, word_hashes

BATCH_BYTES = 2**18  # so that all arrays of a batch stay in the cache

Signatures = NDArray[np.uint32]


def signatures(texts: Sequence[str], shingle_words: int, hashes: int, seed: int = 0) -> Signatures:
    """[texts, hashes]: the signatures of the sets of each text's runs of words.

    A text of fewer words has one shingle, all of its words; one without any word has its characters as a word.
    The share of hashes in which two signatures agree estimates the Jaccard similarity of the sets.
    """
    words, offsets = word_hashes(texts)
    if (np.diff(offsets) == 0).any():
        words, offsets = word_hashes(
            [text if has else _spelled(text) for text, has in zip(texts, np.diff(offsets), strict=True)]
        )
    runs, begins = ngram_hashes(words, offsets, shingle_words)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(runs, begins.astype(np.uint64), hashes, seed)
    return np.array(matrix.to_rows(), "<u4").reshape(len(texts), hashes)


def with_signatures(
    documents: Iterable[Document], shingle_words: int, hashes: int
) -> Iterator[tuple[list[Document], Signatures]]:
    """All documents with their signatures, a few at a time."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch, signatures([each.text for each in batch], shingle_words, hashes)
            batch, size = [], 0
    if batch:
        yield batch, signatures([each.text for each in batch], shingle_words, hashes)


def band_hashes(rows: NDArray[Any], band: int, width: int) -> Hashes:
    """[signatures]: one number for the `width` hashes of a band, equal for those that agree in all of them."""
    combined = np.full(len(rows), band, np.uint64)
    for column in range(band * width, (band + 1) * width):
        combined = splitmix64(combined ^ rows[:, column].astype(np.uint64))
    return combined


def _spelled(text: str) -> str:
    """A word for a text that has none, from its characters' numbers; an `x` apart, so that no text has it."""
    return "x".join(["x", *(str(ord(character)) for character in text.strip())])
