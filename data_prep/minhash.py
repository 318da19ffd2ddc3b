"""MinHash signatures of many texts at once (Broder 1997): shingles by numpy, their hashes' minima by rensa."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from data_prep.words import run_hashes, word_hashes


def signatures(texts: Sequence[str], shingle_words: int, hashes: int, seed: int = 0) -> NDArray[np.uint32]:
    """[texts, hashes]: the signatures of the sets of each text's runs of words.

    A text of fewer words has one shingle, all of its words; one without any word has its characters as a word.
    The share of hashes in which two signatures agree estimates the Jaccard similarity of the sets.
    """
    words, offsets = word_hashes(texts)
    if (np.diff(offsets) == 0).any():
        words, offsets = word_hashes(
            [text if has else _spelled(text) for text, has in zip(texts, np.diff(offsets), strict=True)]
        )
    runs, begins = run_hashes(words, offsets, shingle_words)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(runs, begins.astype(np.uint64), hashes, seed)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(texts), hashes)


def _spelled(text: str) -> str:
    """A word for a text that has none, from its characters' numbers."""
    return "_".join(["_", *(str(ord(character)) for character in text.strip())])
