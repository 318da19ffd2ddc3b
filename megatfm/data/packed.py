"""Packed rows, from which batches are copied."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import PAD_DOCUMENT_ID, Field, Fields, PackingConfig
from megatfm.errors import MegatfmError

LOOP_LIMIT = 12
"""So many documents of a row are numbered one by one, which is faster then."""


class TypedField(NamedTuple):
    """A field that is no plain integers [length]: values [total, *shape], or [rows, *shape] of a field of the row."""

    field: Field
    values: NDArray[Any]


@dataclass(frozen=True, eq=False)
class RowStore:
    """The rows of a block on one side: its documents joined in the order of the rows, which are made when copied.

    Rows that lie there ready would take several times the memory: a block with a document of millions of tokens, of
    which a corpus has few but a stream is long in one, would push the other streams' blocks out of the cache.
    """

    fields: Mapping[str, NDArray[np.integer]]
    """The objective's integers [length], [total] each, of at most 32 bits."""
    typed: Mapping[str, TypedField]
    """Its other fields."""
    starts: list[int]
    """Where the documents start, and the last one ends. None is empty."""
    bounds: list[int]
    """Where the rows start, and the last one ends."""
    blank: list[bool] | None
    """Which documents are padding."""
    fills: Mapping[str, float]
    """What stands in the padding of `fields`, and then of "documents" and "positions"."""
    length: int
    as_one_document: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that a copy fills in."""
        return tuple(self.fills)

    @property
    def n_rows(self) -> int:
        """Rows that the block makes, of `length` each."""
        return len(self.bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory; of the lists of starts and bounds an estimate."""
        typed = sum(field.values.nbytes for field in self.typed.values())
        return (
            typed
            + sum(field.nbytes for field in self.fields.values())
            + 36 * (len(self.starts) + len(self.bounds))
        )

    @property
    def padding(self) -> "RowStore":
        """No rows."""
        fields = {name: field[:0].copy() for name, field in self.fields.items()}
        typed = {name: TypedField(field, values[:0].copy()) for name, (field, values) in self.typed.items()}
        return replace(self, fields=fields, typed=typed, starts=[0], bounds=[0])

    def allocate(self, rows: int) -> Fields:
        """Arrays [rows, …] for the fields that are no plain integers."""
        return {
            name: np.empty(
                (rows, *([self.length] if field.per == "tokens" else []), *field.shape), values.dtype
            )
            for name, (field, values) in self.typed.items()
        }

    def write_typed(self, number: int, into: Fields, row: int, at: int = 0) -> None:
        """Write the fields that are no plain integers of a row into row `row`, from place `at` on, and padding after
        it; past the last one there is nothing else."""
        begin, n = self._extent(number)
        for name, (field, values) in self.typed.items():
            out = into[name]
            if field.per == "row":
                out[row] = values[number] if number < self.n_rows else field.pad_value
            else:
                out[row, at : at + n], out[row, at + n :] = values[begin : begin + n], field.pad_value

    def _extent(self, number: int) -> tuple[int, int]:
        """Where a row begins, and how long it is; past the last one it is empty."""
        begin, *ends = self.bounds[number : number + 2] or (0,)
        return begin, ends[0] - begin if ends else 0

    def write_row(
        self, number: int, into: NDArray[np.int64], at: int = 0, documents: int = 0
    ) -> tuple[int, int]:
        """Write all integers [fields, length] of a row from place `at` on, and padding after it; past the last row
        there is nothing else.

        documents: how many there are before `at`. Returns where the row ends, and how many there are then.
        """
        begin, n = self._extent(number)
        end = at + n
        for values, out in zip(self.fields.values(), into, strict=False):
            out[at:end] = values[begin : begin + n]
        if end < self.length:
            into[:, end:] = np.array(list(self.fills.values()))[:, None]
        if not n:
            return end, documents
        found = self._number(begin, into[-2, at:end], into[-1, at:end])
        if at and self.as_one_document:
            into[-1, at:end] += at if self.blank is None else at * (into[-2, at:end] != PAD_DOCUMENT_ID)
        elif documents:
            into[-2, at:end] += (
                documents if self.blank is None else documents * (into[-2, at:end] != PAD_DOCUMENT_ID)
            )
        return end, documents + found

    def _number(self, begin: int, documents: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """Number the documents of a row that starts at `begin`, and the positions in their pieces; how many it has."""
        n, ramp, starts = len(documents), _arange(self.length), self.starts
        if self.as_one_document:
            documents[:], positions[:] = 0, ramp[:n]
            if self.blank is None:
                return 1
        first, after = bisect_right(starts, begin) - 1, bisect_left(starts, begin + n)
        if after - first > LOOP_LIMIT and self.blank is None:
            bounds = np.clip(np.array(starts[first : after + 1]) - begin, 0, n)
            counts = np.diff(bounds)
            documents[:] = np.repeat(ramp[: after - first], counts)
            positions[:] = ramp[:n] - np.repeat(bounds[:-1], counts)
            return after - first
        for number in range(first, after):
            piece = slice(max(starts[number] - begin, 0), min(starts[number + 1] - begin, n))
            if self.blank is not None and self.blank[number]:
                documents[piece], positions[piece] = PAD_DOCUMENT_ID, 0
            elif not self.as_one_document:
                documents[piece], positions[piece] = number - first, ramp[: piece.stop - piece.start]
        return after - first


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """The rows of a block: every field, and for each side "documents" (0, 1, … in the row, the same for all sides of
    a sequence; −1: padding) and "positions" (from 0 in each piece of a document)."""

    sides: tuple[RowStore, ...]

    @property
    def n_rows(self) -> int:
        """Number of rows, the same for every side."""
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
        """One row by name, integers [length of the side] as int64; past the end of the block there is padding."""
        return {name: rows[0] for name, rows in collate([[(self, number)]]).items()}


RowSources = Sequence[tuple[PackedBlock, int]]
"""Of a row: blocks, and which row of each; more than one where it is cut out of more than one block."""


def collate(rows: Sequence[RowSources]) -> Fields:
    """Rows of blocks that were packed alike, by name: integers [n, length of the side] as int64, others as they are."""
    fields: Fields = {}
    for number, side in enumerate(rows[0][0][0].sides):
        batch, typed = np.empty((len(side.names), len(rows), side.length), np.int64), side.allocate(len(rows))
        for row, row_sources in enumerate(rows):
            at = documents = 0
            for block, part in row_sources:
                if typed:
                    block.sides[number].write_typed(part, typed, row, at)
                at, documents = block.sides[number].write_row(part, batch[:, row], at, documents)
        fields.update(zip(side.names, batch, strict=True))
        fields.update(typed)
    return fields


def split_plain_fields(
    fields: Mapping[str, NDArray[Any]], how: PackingConfig
) -> tuple[dict[str, NDArray[np.integer]], dict[str, TypedField]]:
    """Integers [total], in at most 32 bits, and all other fields. Raises a MegatfmError if an integer doesn't fit."""
    known = {name: how.field(name) for name in fields}
    plain = {
        name
        for name, field in known.items()
        if (field.per, field.shape, field.dtype) == ("tokens", (), "int64")
    }
    return (
        {name: _as_int32(values, name) for name, values in fields.items() if name in plain},
        {name: TypedField(known[name], values) for name, values in fields.items() if name not in plain},
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
