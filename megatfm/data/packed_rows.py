"""Packed rows: sequences joined in row order, from which batches are copied.

`pack_chunked` joins the documents of a block and cuts them where rows end; `BinPackedRows` keeps sequences whole. Both
build a `PackedBlock`, and `collate` copies its rows into a batch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megatfm.data.bin_packing import assign_rows
from megatfm.data.chunks import (
    ChunkTable,
    DocumentSource,
    build_batch,
    build_sequences,
    find_batch_build,
    split_documents,
)
from megatfm.data.documents import InMemoryDocuments
from megatfm.data.row_store import RowStore, TypedField, is_plain, split_plain_fields, to_int32
from megatfm.data.sequences import Fields, PackingConfig, find_side, split_inner_documents, split_parts


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


RowSegments = Sequence[tuple["PackedBlock | BinPackedRows", int]]
"""(Block, row index) of each segment of a row; several if the row spans blocks."""


def collate(rows: Sequence[RowSegments]) -> Fields:
    """Copy rows into a batch: integers [n, length of the side] as int64, other fields in their declared types.

    All blocks must have the same packing settings.
    """
    fields: Fields = {}
    built = _build_rows(rows)
    for side_index, side in enumerate(built[0][0][0].sides):
        batch = np.empty((len(side.names), len(rows), side.length), np.int64)
        typed_fields = side.allocate(len(rows))
        for row, segments in enumerate(built):
            offset = documents = 0
            for block, source_row in segments:
                if typed_fields:
                    block.sides[side_index].write_typed(source_row, typed_fields, row, offset)
                offset, documents = block.sides[side_index].write_row(source_row, batch[:, row], offset, documents)
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
        self._documents, self.packing, self._epoch = documents, packing, epoch
        lengths, first = documents.lengths, documents.first
        chunks = split_documents(lengths, packing.objective, first, packing.seed, documents).without_empty()
        rows = assign_rows(packing.objective, chunks.lengths, packing.row_lengths)
        order = np.argsort(rows, kind="stable")
        self._chunks: ChunkTable = chunks.take(order)
        self._bounds = np.searchsorted(rows[order], np.arange(int(rows.max(initial=-1)) + 2)).tolist()

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self._bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory, excluding the documents."""
        return self._chunks.nbytes + 36 * len(self._bounds)

    def build_all_rows(self) -> PackedBlock:
        """Build all rows."""
        return lay_out_rows([self.build_row(index) for index in range(self.n_rows)], self.packing)

    @property
    def padding(self) -> PackedBlock:
        """A block of no rows, so that every row of it is padding."""
        return lay_out_rows([self.build_row(0)], self.packing).padding

    def build_row(self, index: int) -> "RowSequences":
        """Build the sequences of a row."""
        chunks = self._chunks.take(slice(*self._bounds[index : index + 2]))
        sequences = build_sequences(self.packing, chunks, self._documents, self._epoch)
        is_quarantined = self._documents.is_quarantined
        is_padding = None if is_quarantined is None else is_quarantined[chunks.documents]
        return RowSequences(sequences, chunks.lengths, is_padding)


class RowSequences(NamedTuple):
    """The built sequences of a row, in stored order."""

    sequences: Sequence[Fields]
    lengths: NDArray[np.int64]
    """Length of each sequence on each side [P, sides]."""
    is_padding: NDArray[np.bool_] | None
    """Which sequences are padding [P]."""


def _build_rows(rows: Sequence[RowSegments]) -> list[list[tuple[PackedBlock, int]]]:
    """Replace rows that are not built yet. They are laid out together, since the work of one layout is mostly fixed."""
    unbuilt = [segment for segments in rows for segment in segments if isinstance(segment[0], BinPackedRows)]
    if not unbuilt:
        return cast(list[list[tuple[PackedBlock, int]]], rows)
    sequences = [cast(BinPackedRows, block).build_row(index) for block, index in unbuilt]
    joined = lay_out_rows(sequences, cast(BinPackedRows, unbuilt[0][0]).packing)
    numbers = itertools.count()
    return [
        [(joined, next(numbers)) if isinstance(block, BinPackedRows) else (block, index) for block, index in segments]
        for segments in rows
    ]


def lay_out_rows(rows: Sequence[RowSequences], packing: PackingConfig) -> PackedBlock:
    """Join the sequences of rows, at least one, into a block."""
    sides, prefixes = [], packing.objective.field_prefixes
    sequences = [sequence for row in rows for sequence in row.sequences]
    lengths = np.concatenate([row.lengths for row in rows])
    firsts = np.cumsum([0, *(len(row.sequences) for row in rows)])
    is_padding = _join_padding(rows)
    for side, length in enumerate(packing.row_lengths):
        names = [name for name in sequences[0] if find_side(name, prefixes) == side]
        integers = {
            name: np.concatenate([sequence[name] for sequence in sequences])
            for name in names
            if is_plain(packing.field(name))
        }
        typed_fields = {name: _join_typed(rows, name, packing) for name in names if name not in integers}
        starts = np.concatenate([[0], np.cumsum(lengths[:, side])])
        inner_starts, inner_padding = split_inner_documents(integers, starts, is_padding, prefixes[side])
        plain = {name: to_int32(values, name) for name, values in integers.items()}
        document_starts, sequence_of_document = split_parts(inner_starts, plain.get("parts"))
        sides.append(
            RowStore(
                fields=plain,
                typed=typed_fields,
                starts=document_starts.tolist(),
                bounds=starts[firsts].tolist(),
                is_padding=None if inner_padding is None else inner_padding[sequence_of_document].tolist(),
                pad_values=packing.get_pad_values(plain, side),
                length=length,
                as_one_document=packing.attend_across_documents,
            )
        )
    return PackedBlock(tuple(sides))


def _join_typed(rows: Sequence[RowSequences], name: str, packing: PackingConfig) -> TypedField:
    """Join a field of the sequences of each row; images are large, so that one alone in its row isn't copied."""
    field = packing.field(name)
    if field.per == "row":
        return TypedField(field, np.stack([sequence[name] for row in rows for sequence in row.sequences]))
    values = [[sequence[name] for sequence in row.sequences] for row in rows]
    return TypedField(field, [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in values])


def _join_padding(rows: Sequence[RowSequences]) -> NDArray[np.bool_] | None:
    """Mask of the sequences of padding of all rows; None: there are none."""
    if all(row.is_padding is None for row in rows):
        return None
    return np.concatenate(
        [np.zeros(len(row.sequences), np.bool_) if row.is_padding is None else row.is_padding for row in rows]
    )


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
