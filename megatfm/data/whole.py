"""Packing by fitting: whole sequences side by side in rows, none ever cut."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import NO_DOCUMENT, Fields, Objective, fill_of, joined, padded, side_of
from megatfm.data.pieces import Pieces


def best_fit(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    """The row [P] of each sequence of `lengths` [P, sides]: the longest first, each where least room is left after it.

    Best fit decreasing takes at most 11/9 of the fewest possible rows, and a few (Johnson et al. 1974). With two
    sides, room and length are measured in parts of each side's row. Rows are numbered by their first sequences.
    """
    rows = np.arange(len(lengths))
    # A sequence that fills one side shares its row with none.
    shared = np.flatnonzero((lengths != np.array(capacities)).all(axis=1))
    fit = _fit_one if len(capacities) == 1 else _fit_many
    rows[shared] = len(lengths) + fit(lengths[shared], capacities)
    _, first, number = np.unique(rows, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _fit_one(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    order = np.argsort(-lengths[:, 0], kind="stable")
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    n_rows = 0
    for piece, length in zip(order.tolist(), lengths[order, 0].tolist(), strict=True):
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
        else:
            room, row = capacities[0], n_rows
            n_rows += 1
        rows[piece] = row
        if room > length:
            insort(open_rows, (room - length, row))
    return rows


def _fit_many(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    shares = lengths / np.array(capacities)
    rows = np.empty(len(lengths), np.int64)
    room = np.tile(np.array(capacities, np.int64), (len(lengths), 1))
    left = np.full(len(lengths), float(len(capacities)))
    n_rows = 0
    for piece in np.argsort(-shares.max(axis=1), kind="stable").tolist():
        fits = np.flatnonzero((room[:n_rows] >= lengths[piece]).all(axis=1))
        row = int(fits[left[fits].argmin()]) if len(fits) else n_rows
        n_rows = max(n_rows, row + 1)
        rows[piece] = row
        room[row] -= lengths[piece]
        left[row] -= shares[piece].sum()
    return rows


@dataclass(frozen=True, eq=False)
class Side:
    """One side's fields [total] of the rows joined, which start at `offsets` [rows + 1]."""

    prefix: str
    length: int
    fields: dict[str, NDArray[np.int32]]
    documents: NDArray[np.int32]
    positions: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def row(self, number: int, fills: Mapping[str, int], as_one_document: bool) -> Fields:
        begin, end = self.offsets[[min(n, len(self.offsets) - 1) for n in (number, number + 1)]].tolist()
        row = {
            name: padded(field[begin:end], self.length, fills[name]) for name, field in self.fields.items()
        }
        documents, positions = self.documents[begin:end], self.positions[begin:end]
        if as_one_document:
            documents = np.minimum(documents, 0)
            positions = np.where(documents == NO_DOCUMENT, 0, np.arange(end - begin, dtype=np.int32))
        row[f"{self.prefix}documents"] = padded(documents, self.length, NO_DOCUMENT)
        row[f"{self.prefix}positions"] = padded(positions, self.length, 0)
        return row


@dataclass(frozen=True, eq=False)
class WholeBlock:
    """The rows of a block."""

    sides: tuple[Side, ...]
    fills: Mapping[str, int]

    @property
    def n_rows(self) -> int:
        return len(self.sides[0].offsets) - 1

    @property
    def nbytes(self) -> int:
        fields = [field for side in self.sides for field in side.fields.values()]
        return sum(
            field.nbytes for field in (*fields, *(a for s in self.sides for a in (s.documents, s.positions)))
        )

    def row(self, number: int, as_one_document: bool = False) -> Fields:
        """Row `number`: every field, and for each side "documents" (0, 1, … in the row, the same for all sides of a
        sequence) and "positions" (from 0 in each sequence); past the end of the block there is padding."""
        row: Fields = {}
        for side in self.sides:
            row.update(side.row(number, self.fills, as_one_document))
        return row


def fitted_rows(
    built: Sequence[Mapping[str, NDArray[np.integer]]],
    pieces: Pieces,
    rows: NDArray[np.int64],
    objective: Objective,
    capacities: Sequence[int],
    pad_id: int,
    blank: NDArray[np.bool_],
) -> WholeBlock:
    """Lay built sequences [P] into their rows [P]; in a row they stand in stored order. blank [P]: are padding."""
    order = np.argsort(rows, kind="stable")
    in_order, n_rows = rows[order], int(rows.max(initial=-1)) + 1
    numbers = np.arange(len(order)) - np.searchsorted(in_order, in_order)
    numbers[blank[order]] = NO_DOCUMENT
    sides = []
    for side, prefix in enumerate(objective.sides):
        lengths = pieces.lengths[order, side]
        starts = np.cumsum(lengths) - lengths
        names = [name for name in built[0] if side_of(name, objective.sides) == side]
        row_lengths = np.bincount(in_order, lengths, n_rows).astype(np.int64)
        sides.append(
            Side(
                prefix,
                capacities[side],
                {name: joined([built[i][name] for i in order.tolist()], name) for name in names},
                np.repeat(numbers, lengths).astype(np.int32),
                np.where(
                    np.repeat(blank[order], lengths), 0, np.arange(lengths.sum()) - np.repeat(starts, lengths)
                ).astype(np.int32),
                np.concatenate([[0], np.cumsum(row_lengths)]),
            )
        )
    fills = {name: fill_of(name, objective.sides, objective.fills, pad_id) for name in built[0]}
    return WholeBlock(tuple(sides), fills)
