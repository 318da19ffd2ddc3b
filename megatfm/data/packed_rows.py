"""Packed rows: sequences joined in row order, from which batches are copied.

`pack_chunked` joins the documents of a block and cuts them where rows end; `BinPackedRows` keeps sequences whole. Both
build a `PackedBlock`, and `collate` copies its rows into a batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.data.bin_packing import assign_rows, split_parts
from megatfm.data.documents import InMemoryDocuments
from megatfm.data.inner_documents import with_inner_documents
from megatfm.data.sequences import (
    PAD_DOCUMENT_ID,
    ChunkTable,
    DocumentSource,
    Field,
    Fields,
    PackingConfig,
    batch_build_of,
    build_batch,
    build_sequences,
    prefix_index,
    split_documents,
)
from megatfm.errors import MegatfmError

LOOP_LIMIT = 12
"""Rows of at most this many documents are numbered in a Python loop, which is faster than NumPy for so few."""


class TypedField(NamedTuple):
    """A field other than integers [length]: values [total, *shape], or [rows, *shape] for one value per row."""

    field: Field
    values: NDArray[Any]


@dataclass(frozen=True, eq=False)
class RowStore:
    """One side of a block: its documents joined in row order. Rows are built when they are copied into a batch.

    Finished rows would take several times the memory, and one block with a document of millions of tokens would evict
    the blocks of other streams from the cache.
    """

    fields: Mapping[str, NDArray[np.integer]]
    """The objective's plain integer fields, joined [total], of at most 32 bits."""
    typed: Mapping[str, TypedField]
    """The objective's other fields."""
    starts: list[int]
    """Starts of the documents, none of them empty, and the end of the last."""
    bounds: list[int]
    """Starts of the rows, and the end of the last."""
    blank: list[bool] | None
    """True for each document that is padding; None: there are none."""
    fills: Mapping[str, float]
    """Padding values of `fields`, followed by those of "documents" and "positions"."""
    length: int
    as_one_document: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the integer fields that `write_row` writes, in order."""
        return tuple(self.fills)

    @property
    def n_rows(self) -> int:
        """Number of rows of `length`."""
        return len(self.bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        arrays = [*self.fields.values(), *(field.values for field in self.typed.values())]
        return sum(array.nbytes for array in arrays) + 36 * (len(self.starts) + len(self.bounds))

    @property
    def padding(self) -> "RowStore":
        """A store without rows, so that every row of it is padding."""
        fields = {name: field[:0].copy() for name, field in self.fields.items()}
        empty = {name: TypedField(field, values[:0].copy()) for name, (field, values) in self.typed.items()}
        return replace(self, fields=fields, typed=empty, starts=[0], bounds=[0])

    def allocate(self, rows: int) -> Fields:
        """Allocate arrays [rows, …] for the `typed` fields."""
        return {
            name: np.empty(
                (rows, *([self.length] if field.per == "tokens" else []), *field.shape), values.dtype
            )
            for name, (field, values) in self.typed.items()
        }

    def write_typed(self, number: int, target: Fields, row: int, at: int = 0) -> None:
        """Write the `typed` fields of row `number` into row `row` of `target` from offset `at`, then padding."""
        begin, n = self._extent(number)
        for name, (field, values) in self.typed.items():
            out = target[name]
            if field.per == "row":
                out[row] = values[number] if number < self.n_rows else field.pad_value
            else:
                out[row, at : at + n], out[row, at + n :] = values[begin : begin + n], field.pad_value

    def _extent(self, number: int) -> tuple[int, int]:
        """Return the start and length of a row; the length is 0 past the last row."""
        begin, *ends = self.bounds[number : number + 2] or (0,)
        return begin, ends[0] - begin if ends else 0

    def write_row(
        self, number: int, target: NDArray[np.int64], at: int = 0, documents: int = 0
    ) -> tuple[int, int]:
        """Write the integer fields [fields, length] of a row from offset `at`, then padding; all padding past the end.

        documents: number of documents before `at`. Returns the end of the row, and the number of documents up to it.
        """
        begin, n = self._extent(number)
        end = at + n
        for values, out in zip(self.fields.values(), target, strict=False):
            out[at:end] = values[begin : begin + n]
        if end < self.length:
            target[:, end:] = np.array(list(self.fills.values()))[:, None]
        if not n:
            return end, documents
        documents_added = self._number(begin, target[-2, at:end], target[-1, at:end])
        if at and self.as_one_document:
            target[-1, at:end] += at if self.blank is None else at * (target[-2, at:end] != PAD_DOCUMENT_ID)
        elif documents:
            document_ids = target[-2, at:end]
            document_ids += documents if self.blank is None else documents * (document_ids != PAD_DOCUMENT_ID)
        return end, documents + documents_added

    def _number(self, begin: int, documents: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """Write document ids and positions of a row that starts at `begin`; return its number of documents."""
        n, ramp, starts = len(documents), _arange(self.length), self.starts
        if self.as_one_document:
            documents[:], positions[:] = 0, ramp[:n]
            if self.blank is None:
                return 1
        first, end = bisect_right(starts, begin) - 1, bisect_left(starts, begin + n)
        if end - first > LOOP_LIMIT and self.blank is None:
            bounds = np.clip(np.array(starts[first : end + 1]) - begin, 0, n)
            counts = np.diff(bounds)
            documents[:] = np.repeat(ramp[: end - first], counts)
            positions[:] = ramp[:n] - np.repeat(bounds[:-1], counts)
            return end - first
        for number in range(first, end):
            chunk = slice(max(starts[number] - begin, 0), min(starts[number + 1] - begin, n))
            if self.blank is not None and self.blank[number]:
                documents[chunk], positions[chunk] = PAD_DOCUMENT_ID, 0
            elif not self.as_one_document:
                documents[chunk], positions[chunk] = number - first, ramp[: chunk.stop - chunk.start]
        return end - first


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

    def row(self, number: int) -> Fields:
        """Return the fields of a row, integers [length of the side] as int64; padding past the last row."""
        return {name: rows[0] for name, rows in collate([[(self, number)]]).items()}


RowSources = Sequence[tuple[PackedBlock, int]]
"""The (block, row index) pairs that make up one row; several if the row spans blocks."""


def collate(rows: Sequence[RowSources]) -> Fields:
    """Copy rows into a batch: integers [n, length of the side] as int64, other fields in their declared types.

    All blocks must have the same packing settings.
    """
    fields: Fields = {}
    for number, side in enumerate(rows[0][0][0].sides):
        batch = np.empty((len(side.names), len(rows), side.length), np.int64)
        typed_fields = side.allocate(len(rows))
        for row, row_sources in enumerate(rows):
            at = documents = 0
            for block, part in row_sources:
                if typed_fields:
                    block.sides[number].write_typed(part, typed_fields, row, at)
                at, documents = block.sides[number].write_row(part, batch[:, row], at, documents)
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
    blank = documents.is_quarantined
    if order:
        chunks = chunks.take(order(len(chunks)))
    join = batch_build_of(packing.objective)
    if join and blank is None:
        joined = build_batch(join, chunks, documents)
        return concat_and_chunk(joined, chunks.lengths[:, 0], None, packing, carry_length)
    sequences = build_sequences(packing, chunks, documents, epoch)
    blank = None if blank is None else blank[chunks.documents]
    fields = {name: np.concatenate([sequence[name] for sequence in sequences]) for name in sequences[0]}
    return concat_and_chunk(fields, chunks.lengths[:, 0], blank, packing, carry_length)


def concat_and_chunk(
    fields: Mapping[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    packing: PackingConfig,
    carry_length: int = 0,
) -> PackedBlock:
    """Cut joined `fields` [total, …] of documents of `lengths` [n] into rows. blank [n]: documents that are padding.

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
        blank=None if blank is None else blank[is_filled].tolist(),
        fills=packing.fills(plain),
        length=length,
        as_one_document=packing.attend_across_documents,
    )
    return PackedBlock((side,))


class BinPackedRows:
    """The rows of a group of blocks. Each row is built when it is read, to save memory."""

    def __init__(self, documents: DocumentSource, packing: PackingConfig, epoch: int) -> None:
        self._documents, self._packing, self._epoch = documents, packing, epoch
        lengths, first = documents.lengths, documents.first
        sizes = lambda: documents.image_sizes  # noqa: E731
        chunks = split_documents(lengths, packing.objective, first, packing.seed, sizes).without_empty()
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

    def row(self, number: int) -> PackedBlock:
        """Build one row, as a block."""
        return self._build_rows(number, number + 1)

    def all_rows(self) -> PackedBlock:
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
        blank = self._documents.is_quarantined
        chunk_blank = None if blank is None else blank[chunks.documents]
        return lay_out_rows(sequences, chunks, rows, chunk_blank, self._packing)


def lay_out_rows(
    sequences: Sequence[Mapping[str, NDArray[Any]]],
    chunks: ChunkTable,
    rows: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    packing: PackingConfig,
) -> PackedBlock:
    """Join built sequences [P] into their `rows` [P], in stored order in each row. blank [P]: sequences of padding."""
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
        inner, blanks = with_inner_documents(fields, starts, None if blank is None else blank[order])
        plain, typed_fields = split_plain_fields(fields, packing)
        document_starts, of_documents = split_parts(inner, plain.get("parts"))
        sides.append(
            RowStore(
                fields=plain,
                typed=typed_fields,
                starts=document_starts.tolist(),
                bounds=[*starts[firsts].tolist(), int(starts[-1])],
                blank=None if blanks is None else blanks[of_documents].tolist(),
                fills=packing.fills(plain, side),
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
    return BinPackedRows(source, packing, 0).all_rows()


def split_plain_fields(
    fields: Mapping[str, NDArray[Any]], packing: PackingConfig
) -> tuple[dict[str, NDArray[np.integer]], dict[str, TypedField]]:
    """Split fields into plain integers [total], of at most 32 bits, and others. Raises a MegatfmError on overflow."""
    field_of = {name: packing.field(name) for name in fields}
    plain = {
        name
        for name, field in field_of.items()
        if (field.per, field.shape, field.dtype) == ("tokens", (), "int64")
    }
    return (
        {name: _as_int32(values, name) for name, values in fields.items() if name in plain},
        {name: TypedField(field_of[name], values) for name, values in fields.items() if name not in plain},
    )


def _as_int32(values: NDArray[np.integer], name: str) -> NDArray[np.integer]:
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values
    if len(values) and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise MegatfmError(f"the objective's field {name!r} has values that do not fit 32-bit integers")
    return values.astype(np.int32)


@lru_cache(maxsize=64)
def _arange(n: int) -> NDArray[np.int64]:
    ramp = np.arange(n)
    ramp.flags.writeable = False
    return ramp
