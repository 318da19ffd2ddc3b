"""Packed rows: sequences joined in row order, from which batches are copied.

`pack_chunked` joins the documents of a block and cuts them where rows end; `BinPackedRows` keeps sequences whole. Both
build a `PackedBlock`, and `collate` copies its rows into a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.bin_packing import assign_rows, split_parts
from megatfm.data.documents import InMemoryDocuments
from megatfm.data.inner_documents import with_inner_documents
from megatfm.data.row_store import RowStore, split_plain_fields
from megatfm.data.sequences import (
    ChunkTable,
    DocumentSource,
    Fields,
    PackingConfig,
    build_batch,
    build_sequences,
    find_batch_build,
    prefix_index,
    split_documents,
)


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """The rows of a block, with all fields of the objective.

    Packing adds for each side "documents" (0, 1, … in the row, the same on all sides of a sequence; −1: padding) and
    "positions" (from 0 in each chunk of a document).
    """

    sides: tuple[RowStore, ...]

    @property
    def n_rows(self) -> int:
        """Number of rows, equal on all sides."""
        return self.sides[0].n_rows

    @property
    def nbytes(self) -> int:
        """Bytes in memory of all sides."""
        return sum(side.nbytes for side in self.sides)

    @property
    def padding(self) -> "PackedBlock":
        """A block of no rows, so that every row of it is padding."""
        return PackedBlock(tuple(side.padding for side in self.sides))

    def build_row(self, index: int) -> Fields:
        """Return the fields of a row, integers [length of the side] as int64; padding past the last row."""
        return {name: rows[0] for name, rows in collate([[(self, index)]]).items()}


RowSources = Sequence[tuple[PackedBlock, int]]
"""The (block, row index) pairs that make up one row; several if the row spans blocks."""


def collate(rows: Sequence[RowSources]) -> Fields:
    """Copy rows into a batch: integers [n, length of the side] as int64, other fields in their declared types.

    All blocks must have the same packing settings.
    """
    fields: Fields = {}
    for side_index, side in enumerate(rows[0][0][0].sides):
        batch = np.empty((len(side.names), len(rows), side.length), np.int64)
        typed_fields = side.allocate(len(rows))
        for row, row_sources in enumerate(rows):
            offset = documents = 0
            for block, source_row in row_sources:
                if typed_fields:
                    block.sides[side_index].write_typed(source_row, typed_fields, row, offset)
                offset, documents = block.sides[side_index].write_row(
                    source_row, batch[:, row], offset, documents
                )
        fields.update(zip(side.names, batch, strict=True))
        fields.update(typed_fields)
    return fields


def pack_chunked(
    documents: DocumentSource,
    packing: PackingConfig,
    *,
    epoch: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    carry_length: int = 0,
) -> PackedBlock:
    """Join the documents of a block, and cut them into rows.

    order: returns the permutation [n] in which n documents are joined. carry_length: tokens that complete the last row
    of the previous block.
    """
    chunks = split_documents(documents.lengths, packing.objective, documents.first, packing.seed)
    is_padding = documents.is_quarantined
    if order:
        chunks = chunks.take(order(len(chunks)))
    join = find_batch_build(packing.objective)
    if join and is_padding is None:
        joined = build_batch(join, chunks, documents)
        return concat_and_chunk(joined, chunks.lengths[:, 0], None, packing, carry_length)
    sequences = build_sequences(packing, chunks, documents, epoch)
    is_padding = None if is_padding is None else is_padding[chunks.documents]
    fields = {name: np.concatenate([sequence[name] for sequence in sequences]) for name in sequences[0]}
    return concat_and_chunk(fields, chunks.lengths[:, 0], is_padding, packing, carry_length)


def concat_and_chunk(
    fields: Mapping[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    is_padding: NDArray[np.bool_] | None,
    packing: PackingConfig,
    carry_length: int = 0,
) -> PackedBlock:
    """Cut joined `fields` [total, …] of documents of `lengths` [n] into rows. is_padding [n]: which are padding.

    Documents of length 0 are skipped. carry_length: tokens that complete the last row of the previous block; if
    above 0, they are row 0.
    """
    (length,), is_filled = packing.row_lengths, lengths > 0
    starts = [0, *np.cumsum(lengths[is_filled]).tolist()]
    total = starts[-1]
    heads = [0] if 0 < carry_length < total else []
    plain, typed_fields = split_plain_fields(fields, packing)
    side = RowStore(
        fields=plain,
        typed=typed_fields,
        starts=starts,
        bounds=[*heads, *range(carry_length if heads else 0, total, length), total],
        is_padding=None if is_padding is None else is_padding[is_filled].tolist(),
        pad_values=packing.get_pad_values(plain),
        length=length,
        as_one_document=packing.attend_across_documents,
    )
    return PackedBlock((side,))


class BinPackedRows:
    """The rows of a group of blocks. Each row is built when it is read, to save memory."""

    def __init__(self, documents: DocumentSource, packing: PackingConfig, epoch: int) -> None:
        self._documents, self._packing, self._epoch = documents, packing, epoch
        lengths, first = documents.lengths, documents.first
        chunks = split_documents(lengths, packing.objective, first, packing.seed, documents).without_empty()
        rows = assign_rows(packing.objective, chunks.lengths, packing.row_lengths)
        order = np.argsort(rows, kind="stable")
        self._chunks: ChunkTable = chunks.take(order)
        self._bounds = np.searchsorted(rows[order], np.arange(int(rows.max(initial=-1)) + 2))

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self._bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory, excluding the documents."""
        return self._chunks.nbytes + self._bounds.nbytes

    def build_row(self, index: int) -> PackedBlock:
        """Build one row, as a block."""
        return self._build_rows(index, index + 1)

    def build_all_rows(self) -> PackedBlock:
        """Build all rows."""
        return self._build_rows(0, self.n_rows)

    @property
    def padding(self) -> PackedBlock:
        """A block of no rows, so that every row of it is padding."""
        return self._build_rows(0, 1).padding

    def _build_rows(self, begin: int, end: int) -> PackedBlock:
        first, last = self._bounds[[begin, end]].tolist()
        chunks = self._chunks.take(np.arange(first, last))
        rows = np.repeat(np.arange(end - begin), np.diff(self._bounds[begin : end + 1]))
        sequences = build_sequences(self._packing, chunks, self._documents, self._epoch)
        is_quarantined = self._documents.is_quarantined
        is_padding = None if is_quarantined is None else is_quarantined[chunks.documents]
        return lay_out_rows(sequences, chunks, rows, is_padding, self._packing)


def lay_out_rows(
    sequences: Sequence[Mapping[str, NDArray[Any]]],
    chunks: ChunkTable,
    rows: NDArray[np.int64],
    is_padding: NDArray[np.bool_] | None,
    packing: PackingConfig,
) -> PackedBlock:
    """Join built sequences [P] into their `rows` [P], in stored order in a row. is_padding [P]: which are padding."""
    order = np.argsort(rows, kind="stable")
    firsts = np.flatnonzero(np.diff(rows[order], prepend=-1))  # the sequences that begin a row
    sides, prefixes = [], packing.objective.field_prefixes
    for side, length in enumerate(packing.row_lengths):
        names = [name for name in sequences[0] if prefix_index(name, prefixes) == side]
        fields = {
            name: (np.stack if packing.field(name).per == "row" else np.concatenate)(
                [sequences[number][name] for number in order.tolist()]
            )
            for name in names
        }
        starts = np.concatenate([[0], np.cumsum(chunks.lengths[order, side])])
        ordered_padding = None if is_padding is None else is_padding[order]
        inner_starts, inner_padding = with_inner_documents(fields, starts, ordered_padding, prefixes[side])
        plain, typed_fields = split_plain_fields(fields, packing)
        document_starts, sequence_of_document = split_parts(inner_starts, plain.get("parts"))
        sides.append(
            RowStore(
                fields=plain,
                typed=typed_fields,
                starts=document_starts.tolist(),
                bounds=[*starts[firsts].tolist(), int(starts[-1])],
                is_padding=None if inner_padding is None else inner_padding[sequence_of_document].tolist(),
                pad_values=packing.get_pad_values(plain, side),
                length=length,
                as_one_document=packing.attend_across_documents,
            )
        )
    return PackedBlock(tuple(sides))


def pack_in_memory(
    documents: Sequence[NDArray[Any]],
    packing: PackingConfig,
    *,
    first: int = 0,
    order: Callable[[int], NDArray[np.int64]] | None = None,
    members: Sequence[Mapping[str, bytes]] | None = None,
) -> PackedBlock:
    """Pack documents in memory as if they were the only block of a corpus.

    first: index of the first document. order: returns the permutation [n] in which n documents are joined, if they are
    cut at row ends. members [D]: files of each document.
    """
    source = InMemoryDocuments(documents, first, members)
    source.measure(getattr(packing.objective, "chunk_sizes", None))
    if packing.objective.max_tokens is None:
        return pack_chunked(source, packing, order=order)
    return BinPackedRows(source, packing, 0).build_all_rows()
