"""The order of training: how many positions a step takes, and the place in a corpus of each.

Both are pure functions: of the step, also while batch and sequence length warm up; of the seed and the rows per block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.byte_cache import ByteCache, nbytes
from megatfm.rng import permutation

Ints = NDArray[np.int64]
MAX_GROUPS = 2**20
"""Units whose order is held in memory; in larger corpora a unit is a run of blocks instead of one."""


class BatchStage(NamedTuple):
    """Some steps alike: `global_batch` positions of the order in each, every row cut into `parts` shorter ones."""

    steps: int
    global_batch: int
    splits_per_row: int = 1


@dataclass(frozen=True)
class BatchSchedule:
    """`warmup` stages, one after another, and then `global_batch` rows without end."""

    global_batch: int
    warmup: tuple[BatchStage, ...] = ()

    def stage(self, step: int) -> BatchStage:
        """Return the stage of a step (from 0)."""
        for stage in self.warmup:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return BatchStage(1, self.global_batch)

    def position(self, step: int) -> int:
        """Return the first position of a step (from 0), where nothing was skipped before."""
        position = 0
        for stage in self.warmup:
            n_steps = min(step, stage.steps)
            position, step = position + n_steps * stage.global_batch, step - n_steps
        return position + step * self.global_batch

    @property
    def batches(self) -> list[int]:
        """Every global batch that occurs."""
        return sorted({self.global_batch, *(stage.global_batch for stage in self.warmup)})


class Interleave(NamedTuple):
    """Round-robin reading of `streams` places, `turn` rows of each (tf.data's cycle_length and block_length)."""

    streams: int
    turn: int = 1


def choose_interleave(global_batch: int, streams: int | None = None) -> Interleave:
    """Streams such that each slot of the batch always reads the same ones: the ranks, which divide the batch, then
    divide the streams, and none reads what another reads. More than 256 would overflow a lone rank's cache."""
    if streams is None and global_batch < 64:
        streams = global_batch * -(-64 // global_batch)
    if streams is None:
        streams = max(n for n in range(1, 257) if global_batch % n == 0)
    return Interleave(streams, max(1, global_batch // streams) if global_batch % streams == 0 else 1)


class RowAddress(NamedTuple):
    """Place of a row: the pass over the corpus, the block, and the row of the packed block."""

    epoch: int
    block: int
    row: int


class RowSlot(NamedTuple):
    """Start of a row: `row` is its place in its block's `block_order`."""

    epoch: int
    block: int
    row: int
    begin: int
    """Size of the epoch before the block."""


class BlockSizes(Protocol):
    """Sizes of a range of blocks."""

    def __call__(self, begin: int, end: int) -> Ints: ...


class _Table(NamedTuple):
    numbers: Ints
    """Numbers of units or blocks, in the epoch's order [n]."""
    starts: Ints
    """Sizes before each in that order [n + 1]."""


class RowOrder:
    """A reproducible order without end of the rows of a corpus; `len` is the rows of an epoch.

    An epoch lists units of consecutive blocks (one block each, up to `MAX_GROUPS` of them) in a permuted order, and in
    each of them its blocks in a permuted order. What lies in that list is cut into rows of `length`, wherever blocks
    end, so that only the last row of an epoch may be shorter. The list of N rows is cut into `streams` contiguous
    segments that are read in turn, `turn` rows of each: neighbours in the order come from different places of the
    corpus, while each stream reads on. The rows that start in a block are permuted. All permutations are keyed by
    (seed, epoch), so `place(k)` needs nothing but k, and each epoch has each row once. `shuffle=False` gives the stored
    order in every epoch.

    Blocks whose rows are planned have rows for their size, and a `length` of 1.

    Memory is bounded, independent of the number of blocks.
    """

    def __init__(
        self,
        group_sizes: Ints,
        block_group: int,
        block_sizes: BlockSizes,
        *,
        seed: int,
        cycle_length: int,
        shuffle: bool,
        turn: int = 1,
        length: int = 1,
    ) -> None:
        """group_sizes [n]: of each unit of `unit` blocks, the last of which may have fewer."""
        self.seed, self.streams, self.turn, self.shuffle, self.length = (
            seed,
            cycle_length,
            turn,
            shuffle,
            length,
        )
        self._unit_sizes, self._unit, self._block_sizes = group_sizes, block_group, block_sizes
        self.size = int(group_sizes.sum())
        # For two epochs, since the loader may fetch ahead into the next one.
        self._epochs: ByteCache[int, _Table] = ByteCache(4 * (group_sizes.nbytes + 8), nbytes)
        self._units: ByteCache[tuple[int, int], _Table] = ByteCache(2**25, nbytes)
        self._rows: ByteCache[tuple[int, int], list[int]] = ByteCache(2**23, _list_bytes)

    def __len__(self) -> int:
        return -(-self.size // self.length)

    def row_address(self, position: int) -> RowAddress:
        """Return where the row at a global position ≥ 0 starts; its number counts the rows that start in the block."""
        (slot,) = self.slots(np.array([position]))
        return RowAddress(slot.epoch, slot.block, self.block_order(slot)[slot.row])

    def slots(self, positions: Ints) -> list[RowSlot]:
        """Return where the rows at global positions [n] start."""
        epochs = positions // len(self)
        slots = np.empty((4, len(positions)), np.int64)
        for epoch in np.unique(epochs).tolist():
            is_in_epoch = epochs == epoch
            at = self._in_epoch(positions[is_in_epoch], epoch) * self.length
            slots[0, is_in_epoch] = epoch
            slots[1, is_in_epoch], offsets = self._find(epoch, at)
            slots[2, is_in_epoch], slots[3, is_in_epoch] = offsets // self.length, at - offsets
        return [RowSlot(*place) for place in slots.T.tolist()]

    def block_at(self, epoch: int, at: int) -> int:
        """Return the block that contains offset `at` of the epoch."""
        blocks, _ = self._find(epoch, np.array([at]))
        return int(blocks[0])

    def _in_epoch(self, positions: Ints, epoch: int) -> Ints:
        """Return the rows of the epoch's list [n] that are at positions [n] of it."""
        steps, stream = np.divmod(self.interleave(positions, epoch) - epoch * len(self), self.streams)
        rows, longer = divmod(len(self), self.streams)  # the first `longer` streams have one row more
        return stream * rows + np.minimum(stream, longer) + steps

    def _find(self, epoch: int, at: Ints) -> tuple[Ints, Ints]:
        """The blocks [n] in which places [n] of an epoch lie, and where in them."""
        blocks, offsets = _find(self._table(epoch), at)
        if self._unit > 1:
            units = blocks.copy()
            for unit in np.unique(units).tolist():
                is_in_unit = units == unit
                blocks[is_in_unit], offsets[is_in_unit] = _find(
                    self._unit_table(epoch, unit), offsets[is_in_unit]
                )
        return blocks, offsets

    def iter_stream_blocks(self, stream: int, epoch: int, turns: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over what a stream reads in an epoch after `turns` rows: block, and the slots from … to.

        Slots count in `block_order`, as `slots` finds them one by one, with `turn` and `length` = 1.
        """
        rows, longer = divmod(len(self), self.streams)
        begin, end = ((stream + after) * rows + min(stream + after, longer) for after in (0, 1))
        for number, at, stop in _runs(self._table(epoch), begin + turns, end):
            if self._unit == 1:
                yield number, at, stop
            else:
                yield from _runs(self._unit_table(epoch, number), at, stop)

    def carry_length(self, begin: int) -> int:
        """Return how much of a long enough block at offset `begin` completes the row begun in the block before."""
        return -begin % self.length

    def block_order(self, slot: RowSlot) -> list[int]:
        """Return the rows that start in the block of a slot, in their order of the epoch."""
        return self._rows.get(slot[:2], partial(self._in_block, slot))

    def interleave(self, positions: Ints, epoch: int) -> Ints:
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
            at < turns * self.streams, interleave(at, self.streams, np.maximum(turns, 1)), at
        )

    def _table(self, epoch: int) -> _Table:
        return self._epochs.get(epoch, partial(self._epoch, epoch))

    def _unit_table(self, epoch: int, unit: int) -> _Table:
        return self._units.get((epoch, unit), partial(self._in_unit, epoch, unit))

    def _epoch(self, epoch: int) -> _Table:
        n = len(self._unit_sizes)
        units = permutation(n, self.seed, "blocks", epoch) if self.shuffle else np.arange(n, dtype=np.int64)
        return _Table(units, _sums(self._unit_sizes[units]))

    def _in_unit(self, epoch: int, unit: int) -> _Table:
        first = unit * self._unit
        sizes = self._block_sizes(first, first + self._unit)
        n = len(sizes)
        blocks = permutation(n, self.seed, "blocks of a unit", epoch, unit) if self.shuffle else np.arange(n)
        return _Table(first + blocks, _sums(sizes[blocks]))

    def _in_block(self, slot: RowSlot) -> list[int]:
        (size,) = self._block_sizes(slot.block, slot.block + 1).tolist()
        rows = -(-(size - self.carry_length(slot.begin)) // self.length)
        if not self.shuffle:
            return list(range(rows))
        return permutation(rows, self.seed, "rows", slot.epoch, slot.block).tolist()


def interleave(k: Ints, cycle_length: int, turn: Ints | int) -> Ints:
    """Positions [n] of an order that takes `turn` rows of each stream, in one that takes single rows."""
    rounds, at = np.divmod(k, cycle_length * turn)
    stream, row = np.divmod(at, turn)
    positions: Ints = np.asarray((rounds * turn + row) * cycle_length + stream, np.int64)
    return positions


def make_row_order(
    sizes: NDArray[np.integer],
    *,
    seed: int,
    cycle_length: int,
    shuffle: bool,
    turn: int = 1,
    length: int = 1,
    max_units: int = MAX_GROUPS,
) -> RowOrder:
    """The order of blocks of these `sizes` [n_blocks]: their rows, or what is cut into rows of `length`."""
    unit = -(-len(sizes) // max_units)
    starts = np.arange(0, len(sizes), unit)
    unit_sizes = np.asarray(sizes if unit == 1 else np.add.reduceat(sizes, starts, dtype=np.int64), np.int64)
    return RowOrder(
        unit_sizes,
        unit,
        _Slices(sizes),
        seed=seed,
        cycle_length=cycle_length,
        shuffle=shuffle,
        turn=turn,
        length=length,
    )


class _Slices:
    """Sizes of blocks from an array."""

    def __init__(self, sizes: NDArray[np.integer]) -> None:
        self._sizes = sizes

    def __call__(self, begin: int, end: int) -> Ints:
        return self._sizes[begin:end].astype(np.int64)


def _find(table: _Table, at: Ints) -> tuple[Ints, Ints]:
    places = table.starts.searchsorted(at, side="right") - 1
    return table.numbers[places], at - table.starts[places]


def _runs(table: _Table, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Units or blocks of the rows at … end − 1 of a table, and which of their own rows these are: from … to."""
    place = int(table.starts.searchsorted(at, side="right")) - 1
    while at < end:
        first, after = table.starts[place : place + 2].tolist()
        stop = min(after, end)
        if stop > at:
            yield int(table.numbers[place]), at - first, stop - first
        at, place = stop, place + 1


def _list_bytes(rows: list[int]) -> int:
    return 36 * len(rows)


def _sums(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)])
