"""Documents, packed: by fitting where the objective wants its sequences whole, by cutting otherwise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.build import DocumentSource, batch_build_of, build_batch, build_sequences
from megatfm.data.cut import concat_and_chunk
from megatfm.data.documents import InMemoryDocuments
from megatfm.data.packed import PackedBlock
from megatfm.data.packing import PackingConfig
from megatfm.data.pieces import ChunkTable, split_documents
from megatfm.data.whole import assign_rows, lay_out_rows


def cut(
    documents: DocumentSource,
    how: PackingConfig,
    *,
    epoch: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    head: int = 0,
) -> PackedBlock:
    """Join the documents of a block, and cut them into rows.

    order: for n documents a permutation [n] in which they are joined. head: how much is the end of a row of the block
    before.
    """
    pieces, blank = (
        split_documents(documents.lengths, how.objective, documents.first, how.seed),
        documents.is_quarantined,
    )
    if order:
        pieces = pieces.take(order(len(pieces)))
    join = batch_build_of(how.objective)
    if join and blank is None:
        return concat_and_chunk(build_batch(join, pieces, documents), pieces.lengths[:, 0], None, how, head)
    built = build_sequences(how, pieces, documents, epoch)
    blank = None if blank is None else blank[pieces.documents]
    fields = {name: np.concatenate([one[name] for one in built]) for name in built[0]}
    return concat_and_chunk(fields, pieces.lengths[:, 0], blank, how, head)


class BinPackedRows:
    """The rows of a group of blocks, each of which is built when it is asked for, so that little is in memory."""

    def __init__(self, documents: DocumentSource, how: PackingConfig, epoch: int) -> None:
        self._documents, self._how, self._epoch = documents, how, epoch
        pieces = split_documents(documents.lengths, how.objective, documents.first, how.seed).without_empty()
        rows = assign_rows(how.objective, pieces.lengths, how.row_lengths)
        order = np.argsort(rows, kind="stable")
        self._pieces: ChunkTable = pieces.take(order)
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
        return self._build_rows(number, number + 1)

    def all_rows(self) -> PackedBlock:
        """All rows."""
        return self._build_rows(0, self.n_rows)

    @property
    def padding(self) -> PackedBlock:
        """A block of no rows, so that every row of it is padding."""
        return self._build_rows(0, 1).padding

    def _build_rows(self, begin: int, end: int) -> PackedBlock:
        first, after = self._bounds[[begin, end]].tolist()
        pieces = self._pieces.take(np.arange(first, after))
        rows = np.repeat(np.arange(end - begin), np.diff(self._bounds[begin : end + 1]))
        built, blank = (
            build_sequences(self._how, pieces, self._documents, self._epoch),
            self._documents.is_quarantined,
        )
        of_pieces = None if blank is None else blank[pieces.documents]
        return lay_out_rows(built, pieces, rows, of_pieces, self._how)


def pack_in_memory(
    documents: Sequence[NDArray[Any]],
    how: PackingConfig,
    *,
    first: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    members: Sequence[Mapping[str, bytes]] | None = None,
) -> PackedBlock:
    """Documents that are in memory, the first of which has the number `first`, as the only block of a corpus.

    order: for n documents a permutation [n] in which they are joined, where they are cut at row ends. members [D]: the
    files that belong to each.
    """
    held = InMemoryDocuments(documents, first, members)
    if how.objective.max_tokens is None:
        return cut(held, how, order=order)
    return BinPackedRows(held, how, 0).all_rows()
