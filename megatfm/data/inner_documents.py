"""Sequences that are several documents: packing keeps them together, and attention keeps them apart.

So a pair of answers lies in one row. An objective with `max_tokens` makes the field `begins`, which packing takes out.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BEGINS = "begins"
"""Field of a sequence [n]: not 0 at the first token of each of its documents but the first."""


def with_inner_documents(
    fields: dict[str, NDArray[Any]], starts: NDArray[np.int64], blank: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return where documents start, and which are padding, of sequences at `starts` [P + 1], the last the end.

    fields: of all sequences, one after another; loses `begins`. blank [P]: sequences that are padding.
    """
    begins = fields.pop(BEGINS, None)
    if begins is None:
        return starts, blank
    within = np.union1d(starts, np.flatnonzero(begins))
    if blank is not None:
        blank = blank[starts.searchsorted(within[:-1], side="right") - 1]
    return within, blank
