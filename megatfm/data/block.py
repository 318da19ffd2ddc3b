"""A block of documents, packed: by fitting where the objective wants its sequences whole, by cutting otherwise."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import CutBlock, Objective, build_pieces, cut_rows
from megatfm.data.pieces import pieces_of
from megatfm.data.whole import WholeBlock, best_fit, fitted_rows

PackedBlock = CutBlock | WholeBlock


def pack(
    documents: Sequence[NDArray[Any]],
    objective: Objective,
    *,
    row_lengths: Sequence[int],
    seed: int,
    epoch: int = 0,
    first: int = 0,
    pad_id: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    blank: NDArray[np.bool_] | None = None,
) -> PackedBlock:
    """Build and pack documents, the first of which has the number `first` in its corpus.

    row_lengths: one for each of the objective's sides. order: for n documents a permutation [n] in which they are
    joined, where they are cut at row ends. blank [D]: documents that become padding of the same length.
    """
    blank = np.zeros(len(documents), np.bool_) if blank is None else blank
    pieces = pieces_of(np.array([len(d) for d in documents], np.int64), objective, first, seed)
    whole = objective.max_tokens is not None
    if whole:
        pieces = pieces.with_sequences()
    elif order:
        pieces = pieces.take(order(len(pieces)))
    built = build_pieces(objective, pieces, documents, first, seed, epoch, blank, pad_id)
    blank = blank[pieces.documents]
    if not whole:
        return cut_rows(built, objective, row_lengths[0], pad_id, blank)
    rows = best_fit(pieces.lengths, row_lengths)
    return fitted_rows(built, pieces, rows, objective, row_lengths, pad_id, blank)
