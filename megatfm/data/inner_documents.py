"""Sequences that hold several documents: packing keeps them in one row, and attention keeps them apart.

Examples are a pair of answers, and the images of one text. An objective with `max_tokens` marks the documents by the
field `begins`, which packing removes, or by the field `parts`, which the model also reads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BEGINS = "begins"
"""Field of a sequence [n]: nonzero at the first token of each document after the first."""


def with_inner_documents(
    fields: dict[str, NDArray[Any]],
    starts: NDArray[np.int64],
    is_padding: NDArray[np.bool_] | None,
    prefix: str = "",
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return document starts [n + 1] and a padding mask [n] for sequences at `starts` [P + 1].

    fields: joined fields of all sequences; `begins`, with the side's prefix, is removed from it. is_padding [P]: True
    for sequences that are padding.
    """
    begins = fields.pop(prefix + BEGINS, None)
    if begins is None:
        return starts, is_padding
    document_starts = np.union1d(starts, np.flatnonzero(begins))
    if is_padding is not None:
        is_padding = is_padding[starts.searchsorted(document_starts[:-1], side="right") - 1]
    return document_starts, is_padding


def split_parts(
    starts: NDArray[np.int64], parts: NDArray[np.integer] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split sequences that hold several documents: return document starts [n + 1] and the sequence of each [n].

    starts [P + 1]: starts of the sequences. parts [total]: the objective's field with the index of the document in its
    sequence; None: each sequence is one document.
    """
    if parts is None:
        return starts, np.arange(len(starts) - 1)
    inner = np.flatnonzero(np.diff(parts)) + 1
    document_starts = np.union1d(starts, inner)
    return document_starts, np.searchsorted(starts, document_starts[:-1], side="right") - 1
