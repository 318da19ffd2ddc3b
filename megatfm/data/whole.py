"""Packing by fitting: whole sequences side by side in rows, none ever cut."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packed import PackedBlock, RowStore, split_plain_fields
from megatfm.data.packing import PackingConfig, PackingObjective, needs_own_row, prefix_index
from megatfm.data.pieces import ChunkTable


def assign_rows(
    objective: PackingObjective, lengths: NDArray[np.int64], capacities: Sequence[int]
) -> NDArray[np.int64]:
    """The row [P] of each sequence of `lengths` [P, sides]: its own, or the one in which it fits best."""
    return np.arange(len(lengths)) if needs_own_row(objective) else best_fit_decreasing(lengths, capacities)


def best_fit_decreasing(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
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


def lay_out_rows(
    built: Sequence[Mapping[str, NDArray[Any]]],
    pieces: ChunkTable,
    rows: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    how: PackingConfig,
) -> PackedBlock:
    """Lay built sequences [P] into their rows [P]; in a row they stand in stored order. blank [P]: are padding."""
    order = np.argsort(rows, kind="stable")
    firsts = np.flatnonzero(np.diff(rows[order], prepend=-1))  # the sequences that begin a row
    sides, prefixes = [], how.objective.field_prefixes
    for side, length in enumerate(how.row_lengths):
        names = [name for name in built[0] if prefix_index(name, prefixes) == side]
        fields = {
            name: (np.stack if how.field(name).per == "row" else np.concatenate)(
                [built[number][name] for number in order.tolist()]
            )
            for name in names
        }
        plain, typed = split_plain_fields(fields, how)
        starts = np.concatenate([[0], np.cumsum(pieces.lengths[order, side])])
        sides.append(
            RowStore(
                fields=plain,
                typed=typed,
                starts=starts.tolist(),
                bounds=[*starts[firsts].tolist(), int(starts[-1])],
                blank=None if blank is None else blank[order].tolist(),
                fills=how.fills(plain, side),
                length=length,
                as_one_document=how.attend_across_documents,
            )
        )
    return PackedBlock(tuple(sides))
