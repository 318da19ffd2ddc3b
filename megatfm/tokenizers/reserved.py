"""Keeps reserved ids out of text: where a library takes a text's characters for one, they are spelled out."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class ReservedTokenEscaper:
    """Replaces ids that must not come from text by the ids of their names' characters, given for each."""

    def __init__(self, spelling: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self._spelling = {token: np.array(ids, np.int32) for token, ids in spelling.items()}
        self._is_reserved = np.zeros(vocab_size, np.bool_)
        self._is_reserved[list(spelling)] = True

    def __call__(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The ids of a text without reserved ones; the same array if it has none."""
        places = np.flatnonzero(self._is_reserved[ids]).tolist() if self._spelling else []
        parts, at = [], 0
        for place in places:
            parts += [ids[at:place], self._spelling[int(ids[place])]]
            at = place + 1
        return np.concatenate([*parts, ids[at:]]) if parts else ids
