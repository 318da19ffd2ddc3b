"""A block of documents, packed: by fitting where the objective wants its sequences whole, by cutting otherwise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.build import build_pieces, join_documents, joiner
from megatfm.data.cut import cut_rows
from megatfm.data.packed import PackedBlock
from megatfm.data.packing import Packing
from megatfm.data.pieces import pieces_of
from megatfm.data.whole import fitted_rows, rows_for


def pack(
    documents: Sequence[NDArray[Any]],
    how: Packing,
    *,
    epoch: int = 0,
    first: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    blank: NDArray[np.bool_] | None = None,
    members: Sequence[Mapping[str, bytes]] | None = None,
) -> PackedBlock:
    """Build and pack documents, the first of which has the number `first` in its corpus.

    order: for n documents a permutation [n] in which they are joined, where they are cut at row ends.
    blank [D]: documents that become padding of the same length. members [D]: the files that belong to each.
    """
    objective = how.objective
    pieces = pieces_of(np.array([len(d) for d in documents], np.int64), objective, first, how.seed)
    whole, join = objective.max_tokens is not None, joiner(objective)
    if whole:
        pieces = pieces.with_sequences()
    elif order:
        pieces = pieces.take(order(len(pieces)))
    if join and not whole and blank is None:
        return cut_rows(join_documents(join, pieces, documents), pieces.lengths[:, 0], None, how)
    empty = np.zeros(len(documents), np.bool_) if blank is None else blank
    built = build_pieces(how, pieces, documents, empty, first, epoch, members)
    blank = None if blank is None else blank[pieces.documents]
    if whole:
        rows = rows_for(objective, pieces.lengths, how.row_lengths)
        return fitted_rows(built, pieces, rows, blank, how)
    fields = {name: np.concatenate([one[name] for one in built]) for name in built[0]}
    return cut_rows(fields, pieces.lengths[:, 0], blank, how)
