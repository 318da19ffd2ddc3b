"""Documents, packed: by fitting where the objective wants its sequences whole, by cutting otherwise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.build import Source, build_pieces, join_documents, joiner
from megatfm.data.cut import cut_rows
from megatfm.data.documents import InMemory
from megatfm.data.packed import PackedBlock
from megatfm.data.packing import Packing
from megatfm.data.pieces import Pieces, pieces_of
from megatfm.data.whole import fitted_rows, rows_for


def cut(
    documents: Source,
    how: Packing,
    *,
    epoch: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    head: int = 0,
) -> PackedBlock:
    """Join the documents of a block, and cut them into rows.

    order: for n documents a permutation [n] in which they are joined. head: how much is the end of a row of the block
    before.
    """
    pieces, blank = pieces_of(documents.lengths, how.objective, documents.first, how.seed), documents.blank
    if order:
        pieces = pieces.take(order(len(pieces)))
    join = joiner(how.objective)
    if join and blank is None:
        return cut_rows(join_documents(join, pieces, documents), pieces.lengths[:, 0], None, how, head)
    built = build_pieces(how, pieces, documents, epoch)
    blank = None if blank is None else blank[pieces.documents]
    fields = {name: np.concatenate([one[name] for one in built]) for name in built[0]}
    return cut_rows(fields, pieces.lengths[:, 0], blank, how, head)


class Fitted:
    """The rows of a group of blocks, each of which is built when it is asked for, so that little is in memory."""

    def __init__(self, documents: Source, how: Packing, epoch: int) -> None:
        self._documents, self._how, self._epoch = documents, how, epoch
        pieces = pieces_of(documents.lengths, how.objective, documents.first, how.seed).with_sequences()
        rows = rows_for(how.objective, pieces.lengths, how.row_lengths)
        order = np.argsort(rows, kind="stable")
        self._pieces: Pieces = pieces.take(order)
        self._bounds = np.searchsorted(rows[order], np.arange(int(rows.max(initial=-1)) + 2))

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self._bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory, but for the documents."""
        return self._pieces.nbytes + self._bounds.nbytes

    def row(self, number: int) -> PackedBlock:
        """A row, as a block of its own."""
        return self._made(number, number + 1)

    def whole(self) -> PackedBlock:
        """All rows."""
        return self._made(0, self.n_rows)

    @property
    def padding(self) -> PackedBlock:
        """A block of no rows, so that every row of it is padding."""
        return self._made(0, 1).padding

    def _made(self, begin: int, end: int) -> PackedBlock:
        first, after = self._bounds[[begin, end]].tolist()
        pieces = self._pieces.take(np.arange(first, after))
        rows = np.repeat(np.arange(end - begin), np.diff(self._bounds[begin : end + 1]))
        built, blank = build_pieces(self._how, pieces, self._documents, self._epoch), self._documents.blank
        of_pieces = None if blank is None else blank[pieces.documents]
        return fitted_rows(built, pieces, rows, of_pieces, self._how)


def pack(
    documents: Sequence[NDArray[Any]],
    how: Packing,
    *,
    first: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    members: Sequence[Mapping[str, bytes]] | None = None,
) -> PackedBlock:
    """Documents that are in memory, the first of which has the number `first`, as the only block of a corpus.

    order: for n documents a permutation [n] in which they are joined, where they are cut at row ends. members [D]: the
    files that belong to each.
    """
    held = InMemory(documents, first, members)
    if how.objective.max_tokens is None:
        return cut(held, how, order=order)
    return Fitted(held, how, 0).whole()
