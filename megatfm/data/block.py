"""A block of documents, packed: by fitting where the objective wants its sequences whole, by cutting otherwise."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.cut import cut_rows
from megatfm.data.packing import Objective, build_pieces, join_documents, joiner
from megatfm.data.pieces import pieces_of
from megatfm.data.tables import PackedBlock
from megatfm.data.whole import best_fit, fitted_rows


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
    as_one_document: bool = False,
) -> PackedBlock:
    """Build and pack documents, the first of which has the number `first` in its corpus.

    row_lengths: one for each of the objective's sides. order: for n documents a permutation [n] in which they are
    joined, where they are cut at row ends. blank [D]: documents that become padding of the same length.
    as_one_document: whether what is in a row has one number and counts its positions on.
    """
    pieces = pieces_of(np.array([len(d) for d in documents], np.int64), objective, first, seed)
    whole, join = objective.max_tokens is not None, joiner(objective)
    if whole:
        pieces = pieces.with_sequences()
    elif order:
        pieces = pieces.take(order(len(pieces)))
    if join and not whole and blank is None:
        fields = join_documents(join, pieces, documents)
        return cut_rows(
            fields, pieces.lengths[:, 0], None, objective, row_lengths[0], pad_id, as_one_document
        )
    empty = np.zeros(len(documents), np.bool_) if blank is None else blank
    built = build_pieces(objective, pieces, documents, first, seed, epoch, empty, pad_id)
    blank = None if blank is None else blank[pieces.documents]
    if whole:
        rows = best_fit(pieces.lengths, row_lengths)
        return fitted_rows(built, pieces, rows, blank, objective, row_lengths, pad_id, as_one_document)
    fields = {name: np.concatenate([one[name] for one in built]) for name in built[0]}
    return cut_rows(fields, pieces.lengths[:, 0], blank, objective, row_lengths[0], pad_id, as_one_document)
