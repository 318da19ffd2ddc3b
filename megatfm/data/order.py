"""The order of training: global position → place in a corpus, a pure function of the seed and of rows per block."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.data.cache import ByteCache, nbytes
from megatfm.keyed import permutation

Ints = NDArray[np.int64]

MAX_UNITS = 2**20
"""Units whose order is held in memory; in larger corpora a unit is a run of blocks instead of one."""


class RowAddress(NamedTuple):
    """Where a row is: in which pass over the corpus, block, and row of the packed block."""

    epoch: int
    block: int
    row: int


class BlockRows(Protocol):
    """Rows of a range of blocks."""

    def __call__(self, begin: int, end: int) -> Ints: ...


class _Table(NamedTuple):
    numbers: Ints
    """Of units or blocks, in the epoch's order [n]."""
    first_rows: Ints
    """Numbers [n + 1] of their first rows in that order."""


class Order:
    """A reproducible order without end of the rows of a corpus; `len` is the rows of an epoch.

    An epoch lists units of consecutive blocks (one block each, up to `MAX_UNITS` of them) in a permuted order, in each
    of them its blocks in a permuted order, and cuts that list of N rows into `streams` contiguous segments that are
    read in turn, `turn` rows of each: neighbours in the order come from different places of the corpus, while each
    stream reads on. Inside a block, rows are permuted. All permutations are keyed by (seed, epoch), so `place(k)`
    needs nothing but k, and each epoch has each row once. `shuffle=False` gives the stored order in every epoch.

    Memory is bounded, whatever the number of blocks.
    """

    def __init__(
        self,
        unit_rows: Ints,
        unit: int,
        block_rows: BlockRows,
        *,
        seed: int,
        streams: int,
        shuffle: bool,
        turn: int = 1,
    ) -> None:
        """unit_rows [n]: rows of each unit of `unit` blocks, the last of which may have fewer."""
        self.seed, self.streams, self.turn, self.shuffle = seed, streams, turn, shuffle
        self._unit_rows, self._unit, self._block_rows = unit_rows, unit, block_rows
        self._n_rows = int(unit_rows.sum())
        # For two epochs, since the loader may fetch ahead into the next one.
        self._epochs: ByteCache[int, _Table] = ByteCache(4 * (unit_rows.nbytes + 8), nbytes)
        self._units: ByteCache[tuple[int, int], _Table] = ByteCache(2**25, nbytes)
        self._rows: ByteCache[tuple[int, int], list[int]] = ByteCache(2**23, _list_bytes)

    def __len__(self) -> int:
        return self._n_rows

    def place(self, position: int) -> RowAddress:
        """Where the row at a global position ≥ 0 is."""
        (slot,) = self.slots(np.array([position]))
        return slot._replace(row=self.block_order(slot.epoch, slot.block)[slot.row])

    def slots(self, positions: Ints) -> list[RowAddress]:
        """Where the rows at global positions [n] are; `row` is where in its block's `block_order` each is."""
        epochs = positions // len(self)
        found = np.empty((3, len(positions)), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[0, here] = epoch
            found[1:, here] = self._in_epoch(positions[here], epoch)
        return [RowAddress(*place) for place in found.T.tolist()]

    def _in_epoch(self, positions: Ints, epoch: int) -> tuple[Ints, Ints]:
        """Blocks and slots in them [n] of positions [n] of one epoch."""
        steps, stream = np.divmod(self._in_turns(positions, epoch) - epoch * len(self), self.streams)
        rows, longer = divmod(len(self), self.streams)  # the first `longer` streams have one row more
        index = stream * rows + np.minimum(stream, longer) + steps
        blocks, slots = _find(self._table(epoch), index)
        if self._unit > 1:
            units = blocks.copy()
            for unit in np.unique(units).tolist():
                here = units == unit
                blocks[here], slots[here] = _find(self._unit_table(epoch, unit), slots[here])
        return blocks, slots

    def runs(self, stream: int, epoch: int, turns: int) -> Iterator[tuple[int, int, int]]:
        """What a stream reads in an epoch after so many of its rows: block, and the slots from … to in `block_order`.

        As `slots` finds them one by one, with `turn` = 1.
        """
        rows, longer = divmod(len(self), self.streams)
        begin, end = ((stream + after) * rows + min(stream + after, longer) for after in (0, 1))
        for number, at, stop in _runs(self._table(epoch), begin + turns, end):
            if self._unit == 1:
                yield number, at, stop
            else:
                yield from _runs(self._unit_table(epoch, number), at, stop)

    def block_order(self, epoch: int, block: int) -> list[int]:
        """The rows of a block as they come in an epoch."""
        return self._rows.get((epoch, block), partial(self._in_block, epoch, block))

    def _in_turns(self, positions: Ints, epoch: int) -> Ints:
        """Rounds of all streams' turns begin at multiples of their length, as batches do, and end with the epoch."""
        if self.turn == 1:
            return positions
        length = self.streams * self.turn
        rounds = positions - positions % length
        begin = np.maximum(rounds, epoch * len(self))
        turns = (np.minimum(rounds + length, (epoch + 1) * len(self)) - begin) // self.streams
        at = positions - begin
        # A round that an epoch's edge cuts short ends with single rows.
        return begin + np.where(
            at < turns * self.streams, in_turns(at, self.streams, np.maximum(turns, 1)), at
        )

    def _table(self, epoch: int) -> _Table:
        return self._epochs.get(epoch, partial(self._epoch, epoch))

    def _unit_table(self, epoch: int, unit: int) -> _Table:
        return self._units.get((epoch, unit), partial(self._in_unit, epoch, unit))

    def _epoch(self, epoch: int) -> _Table:
        n = len(self._unit_rows)
        units = permutation(n, self.seed, "blocks", epoch) if self.shuffle else np.arange(n, dtype=np.int64)
        return _Table(units, _sums(self._unit_rows[units]))

    def _in_unit(self, epoch: int, unit: int) -> _Table:
        first = unit * self._unit
        rows = self._block_rows(first, first + self._unit)
        n = len(rows)
        blocks = permutation(n, self.seed, "blocks of a unit", epoch, unit) if self.shuffle else np.arange(n)
        return _Table(first + blocks, _sums(rows[blocks]))

    def _in_block(self, epoch: int, block: int) -> list[int]:
        (rows,) = self._block_rows(block, block + 1).tolist()
        if not self.shuffle:
            return list(range(rows))
        return permutation(rows, self.seed, "rows", epoch, block).tolist()


def in_turns(k: Ints, streams: int, turn: Ints | int) -> Ints:
    """Positions [n] of an order that takes `turn` rows of each stream, in one that takes single rows."""
    rounds, at = np.divmod(k, streams * turn)
    stream, row = np.divmod(at, turn)
    found: Ints = np.asarray((rounds * turn + row) * streams + stream, np.int64)
    return found


def order_of(
    rows: Ints, *, seed: int, streams: int, shuffle: bool, turn: int = 1, max_units: int = MAX_UNITS
) -> Order:
    """The order of blocks with so many `rows` [n_blocks]."""
    unit = -(-len(rows) // max_units)
    unit_rows = rows if unit == 1 else np.add.reduceat(rows, np.arange(0, len(rows), unit), dtype=np.int64)
    slices, unit_rows = _Slices(rows), unit_rows.astype(np.int64)
    return Order(unit_rows, unit, slices, seed=seed, streams=streams, shuffle=shuffle, turn=turn)


class _Slices:
    """Rows per block from an array."""

    def __init__(self, rows: NDArray[np.integer]) -> None:
        self._rows = rows

    def __call__(self, begin: int, end: int) -> Ints:
        return self._rows[begin:end].astype(np.int64)


def _find(table: _Table, rows: Ints) -> tuple[Ints, Ints]:
    at = table.first_rows.searchsorted(rows, side="right") - 1
    return table.numbers[at], rows - table.first_rows[at]


def _runs(table: _Table, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Units or blocks of the rows at … end − 1 of a table, and which of their own rows these are: from … to."""
    place = int(table.first_rows.searchsorted(at, side="right")) - 1
    while at < end:
        first, after = table.first_rows[place : place + 2].tolist()
        stop = min(after, end)
        if stop > at:
            yield int(table.numbers[place]), at - first, stop - first
        at, place = stop, place + 1


def _list_bytes(rows: list[int]) -> int:
    return 36 * len(rows)


def _sums(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)])
