"""Packed rows as tables, from which batches are copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import Fields
from megatfm.errors import MegatfmError


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a block on one side: `values` [fields, rows + 1, length], of which the last row is padding."""

    names: tuple[str, ...]
    values: NDArray[np.int32]

    @classmethod
    def empty(cls, fills: Mapping[str, int], n_rows: int, length: int) -> "Table":
        """Of the fields in `fills`, with room for `n_rows` and with the row of padding."""
        values = np.empty((len(fills), n_rows + 1, length), np.int32)
        values[:, n_rows] = np.array(list(fills.values()))[:, None]
        return cls(tuple(fills), values)

    def flat(self, name: str) -> NDArray[np.int32]:
        """A field's rows one after another [rows · length], to be written; without the row of padding."""
        field: NDArray[np.int32] = self.values[self.names.index(name), :-1].reshape(-1)
        return field


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """The rows of a block: every field, and for each side "documents" (0, 1, … in the row, the same for all sides of
    a sequence; −1: padding) and "positions" (from 0 in each piece of a document)."""

    sides: tuple[Table, ...]

    @property
    def n_rows(self) -> int:
        return self.sides[0].values.shape[1] - 1

    @property
    def nbytes(self) -> int:
        return sum(side.values.nbytes for side in self.sides)

    @property
    def padding(self) -> "PackedBlock":
        """A block of a row of padding."""
        return PackedBlock(tuple(Table(side.names, side.values[:, -1:].repeat(2, 1)) for side in self.sides))

    def row(self, number: int) -> Fields:
        """One row, int64 arrays [length of the side] by name; past the end of the block there is padding."""
        return {name: rows[0] for name, rows in batch_of([(self, min(number, self.n_rows))]).items()}


def batch_of(rows: Sequence[tuple[PackedBlock, int]]) -> Fields:
    """Rows of blocks that were packed alike, int64 arrays [n, length of the side] by name."""
    fields: Fields = {}
    for number, side in enumerate(rows[0][0].sides):
        # All fields of a row in one copy, since for short rows a copy's start takes as long as the copy.
        batch = np.empty((len(side.names), len(rows), side.values.shape[2]), np.int64)
        for at, (block, row) in enumerate(rows):
            batch[:, at] = block.sides[number].values[:, row]
        fields.update(zip(side.names, batch, strict=True))
    return fields


def fitting(values: NDArray[np.integer], name: str) -> NDArray[np.integer]:
    """A field's values, unless they don't fit a table: a MegatfmError."""
    fits = not len(values) or np.can_cast(values.dtype, np.int32)
    if not fits and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise MegatfmError(f"the objective's field {name!r} has values that do not fit 32-bit integers")
    return values
