"""Packed rows, from which batches are copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import Fields
from megatfm.errors import MegatfmError


class Side(Protocol):
    """The rows of a block on one side."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        ...

    @property
    def length(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def padding(self) -> Self:
        """A side of no rows."""
        ...

    def copy_row(self, number: int, into: NDArray[np.int64]) -> None:
        """Write all fields [fields, length] of a row; past the last one there is padding."""
        ...


@dataclass(frozen=True, eq=False)
class Table:
    """Rows that lie there as they are: `values` [fields, rows + 1, length], of which the last row is padding."""

    names: tuple[str, ...]
    values: NDArray[np.int32]

    @classmethod
    def empty(cls, fills: Mapping[str, int], n_rows: int, length: int) -> "Table":
        """Of the fields in `fills`, with room for `n_rows` and with the row of padding."""
        values = np.empty((len(fills), n_rows + 1, length), np.int32)
        values[:, n_rows] = np.array(list(fills.values()))[:, None]
        return cls(tuple(fills), values)

    @property
    def n_rows(self) -> int:
        return self.values.shape[1] - 1

    @property
    def length(self) -> int:
        return self.values.shape[2]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def padding(self) -> "Table":
        return Table(self.names, self.values[:, -1:].copy())

    def copy_row(self, number: int, into: NDArray[np.int64]) -> None:
        # All fields in one copy, since for short rows a copy's start takes as long as the copy.
        into[:] = self.values[:, min(number, self.n_rows)]

    def flat(self, name: str) -> NDArray[np.int32]:
        """A field's rows one after another [rows · length], to be written; without the row of padding."""
        field: NDArray[np.int32] = self.values[self.names.index(name), :-1].reshape(-1)
        return field


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """The rows of a block: every field, and for each side "documents" (0, 1, … in the row, the same for all sides of
    a sequence; −1: padding) and "positions" (from 0 in each piece of a document)."""

    sides: tuple[Side, ...]

    @property
    def n_rows(self) -> int:
        return self.sides[0].n_rows

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.sides)

    @property
    def padding(self) -> "PackedBlock":
        """A block of no rows, so that every row of it is padding."""
        return PackedBlock(tuple(side.padding for side in self.sides))

    def row(self, number: int) -> Fields:
        """One row, int64 arrays [length of the side] by name; past the end of the block there is padding."""
        return {name: rows[0] for name, rows in batch_of([(self, number)]).items()}


def batch_of(rows: Sequence[tuple[PackedBlock, int]]) -> Fields:
    """Rows of blocks that were packed alike, int64 arrays [n, length of the side] by name."""
    fields: Fields = {}
    for number, side in enumerate(rows[0][0].sides):
        batch = np.empty((len(side.names), len(rows), side.length), np.int64)
        for at, (block, row) in enumerate(rows):
            block.sides[number].copy_row(row, batch[:, at])
        fields.update(zip(side.names, batch, strict=True))
    return fields


def fitting(values: NDArray[np.integer], name: str) -> NDArray[np.integer]:
    """A field's values in at most 32 bits; a MegatfmError if they don't fit."""
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values
    if len(values) and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise MegatfmError(f"the objective's field {name!r} has values that do not fit 32-bit integers")
    return values.astype(np.int32)
