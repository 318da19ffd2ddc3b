"""The order of training rows: how many rows each step takes, and where in the corpus each row lies.

Both are pure functions. The batch schedule depends on the step alone, also while batch size and sequence length warm
up. The row order depends on the seed and the size of each block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.byte_cache import ByteCache, count_bytes
from megatfm.corpus.shard_index import compute_running_sum
from megatfm.rng import permutation

Ints = NDArray[np.int64]
MAX_UNITS = 2**20
"""Largest number of shuffled units held in memory. In larger corpora a unit is a run of blocks, not one block."""


class BatchStage(NamedTuple):
    """A run of `steps` with the same batch size and row length.

    Each step takes `global_batch` rows; each row is split into `splits_per_row` shorter rows.
    """

    steps: int
    global_batch: int
    splits_per_row: int = 1


@dataclass(frozen=True)
class BatchSchedule:
    """Batch size and row length of every step: the `rampup` stages in turn, then `global_batch` full rows forever."""

    global_batch: int
    rampup: tuple[BatchStage, ...] = ()

    def stage(self, step: int) -> BatchStage:
        """Return the stage of a step (from 0)."""
        for stage in self.rampup:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return BatchStage(1, self.global_batch)

    @property
    def batches(self) -> list[int]:
        """The distinct global batch sizes, sorted."""
        return sorted({self.global_batch, *(stage.global_batch for stage in self.rampup)})


class Interleave(NamedTuple):
    """Round-robin reading from `streams` segments, `turn` rows at a time (tf.data: cycle_length and block_length)."""

    streams: int
    turn: int = 1


def choose_interleave(global_batch: int, streams: int | None = None) -> Interleave:
    """Choose the interleaving so that each slot of the batch always reads from the same streams.

    Data ranks split the batch, so they also split the streams, and no two ranks share a stream. The default is at most
    256 streams; more would overflow the block cache of a single rank.
    """
    if streams is None and global_batch < 64:
        streams = global_batch * -(-64 // global_batch)
    if streams is None:
        streams = max(n for n in range(1, 257) if global_batch % n == 0)
    return Interleave(streams, max(1, global_batch // streams) if global_batch % streams == 0 else 1)


class RowAddress(NamedTuple):
    """Address of a row: the epoch, the block, and the row index in the packed block."""

    epoch: int
    block: int
    row: int


class RowSlot(NamedTuple):
    """Start of a row: `row` indexes the `get_block_order` of its block."""

    epoch: int
    block: int
    row: int
    begin: int
    """Offset of the block in the epoch."""


BlockSizes = Callable[[int, int], Ints]
"""Returns the sizes of blocks `begin` to `end` − 1."""


class _Table(NamedTuple):
    indices: Ints
    """Unit or block indices in epoch order [n]."""
    starts: Ints
    """Offsets at which they start in the epoch, and the end of the last [n + 1]."""


class RowOrder:
    """A reproducible, endless order of the rows of a corpus; `len` is the number of rows in an epoch.

    1. Each epoch permutes the units, which are runs of consecutive blocks (one block each, up to `MAX_UNITS` units),
       and then the blocks inside each unit.
    2. The epoch is cut into rows of `length`. Rows may span blocks, so only the last row of an epoch may be shorter.
    3. The rows are split into `streams` contiguous segments, which are read round-robin, one row or `turn` at a time.
       Neighbouring rows come from distant blocks, while each stream still reads sequentially.
    4. The rows that start in one block are permuted.

    All permutations are keyed by (seed, epoch), so `find_row(k)` depends on k alone, and each epoch has each row
    once. `shuffle=False` keeps the stored order in every epoch. Bin-packed blocks are measured in rows, with a
    `length` of 1.

    Memory is bounded, independent of the number of blocks.
    """

    def __init__(
        self,
        unit_sizes: Ints,
        blocks_per_unit: int,
        block_sizes: BlockSizes,
        *,
        seed: int,
        streams: Interleave | int,
        shuffle: bool,
        length: int = 1,
    ) -> None:
        """unit_sizes [n]: size of each unit of `blocks_per_unit` blocks; the last unit may have fewer blocks."""
        self.streams, self.turn = Interleave(streams) if isinstance(streams, int) else streams
        self.seed, self.shuffle, self.length = seed, shuffle, length
        self._unit_sizes, self._blocks_per_unit, self._block_sizes = unit_sizes, blocks_per_unit, block_sizes
        self.size = int(unit_sizes.sum())
        # For two epochs, since the loader may fetch ahead into the next one.
        self._epochs: ByteCache[int, _Table] = ByteCache(4 * (unit_sizes.nbytes + 8), count_bytes)
        self._units: ByteCache[tuple[int, int], _Table] = ByteCache(2**25, count_bytes)
        self._rows: ByteCache[tuple[int, int], list[int]] = ByteCache(2**23, _estimate_bytes)

    def __len__(self) -> int:
        return -(-self.size // self.length)

    def find_row(self, position: int) -> RowAddress:
        """Return where the row at a global position ≥ 0 starts; `row` counts the rows that start in the block."""
        (slot,) = self.find_slots(np.array([position]))
        return RowAddress(slot.epoch, slot.block, self.get_block_order(slot)[slot.row])

    def find_slots(self, positions: Ints) -> list[RowSlot]:
        """Return where the rows at global positions [n] start."""
        epochs = positions // len(self)
        slots = np.empty((4, len(positions)), np.int64)
        for epoch in np.unique(epochs).tolist():
            is_in_epoch = epochs == epoch
            at = self._locate_in_epoch(positions[is_in_epoch], epoch) * self.length
            slots[0, is_in_epoch] = epoch
            slots[1, is_in_epoch], offsets = self._find_blocks(epoch, at)
            slots[2, is_in_epoch], slots[3, is_in_epoch] = offsets // self.length, at - offsets
        return [RowSlot(*slot) for slot in slots.T.tolist()]

    def find_block(self, epoch: int, at: int) -> int:
        """Return the block that contains offset `at` of the epoch."""
        blocks, _ = self._find_blocks(epoch, np.array([at]))
        return int(blocks[0])

    def _locate_in_epoch(self, positions: Ints, epoch: int) -> Ints:
        """Map global positions [n] of an epoch to row indices [n] in its list before streams are interleaved."""
        steps, stream = np.divmod(self.interleave(positions, epoch) - epoch * len(self), self.streams)
        rows, longer = divmod(len(self), self.streams)  # the first `longer` streams have one row more
        return stream * rows + np.minimum(stream, longer) + steps

    def _find_blocks(self, epoch: int, at: Ints) -> tuple[Ints, Ints]:
        """Return the blocks [n] that contain offsets `at` [n] of an epoch, and the offsets [n] inside those blocks."""
        blocks, offsets = _find(self._get_epoch_table(epoch), at)
        if self._blocks_per_unit > 1:
            units = blocks.copy()
            for unit in np.unique(units).tolist():
                is_in_unit = units == unit
                blocks[is_in_unit], offsets[is_in_unit] = _find(self._get_unit_table(epoch, unit), offsets[is_in_unit])
        return blocks, offsets

    def iter_stream_blocks(self, stream: int, epoch: int, turns: int) -> Iterator[tuple[int, int, int]]:
        """Yield (block, first slot, end slot) for each block of a stream in an epoch, after its first `turns` rows.

        Slots index `get_block_order`. Needs `turn` = `length` = 1; then it agrees with `find_slots`.
        """
        rows, longer = divmod(len(self), self.streams)
        begin, end = ((stream + after) * rows + min(stream + after, longer) for after in (0, 1))
        for number, at, stop in _iter_runs(self._get_epoch_table(epoch), begin + turns, end):
            if self._blocks_per_unit == 1:
                yield number, at, stop
            else:
                yield from _iter_runs(self._get_unit_table(epoch, number), at, stop)

    def carry_length(self, begin: int) -> int:
        """Return how many tokens of a block at offset `begin` complete the last row of the block before it."""
        return -begin % self.length

    def get_block_order(self, slot: RowSlot) -> list[int]:
        """Return the rows that start in the block of a slot, in epoch order."""
        return self._rows.get(slot[:2], partial(self._permute_block_rows, slot))

    def interleave(self, positions: Ints, epoch: int) -> Ints:
        """Map positions [n] that take `turn` rows per stream to positions that take one row per stream.

        Rounds begin at multiples of `streams` · `turn`, as batches do, and end with the epoch.
        """
        if self.turn == 1:
            return positions
        length = self.streams * self.turn
        rounds = positions - positions % length
        begin = np.maximum(rounds, epoch * len(self))
        turns = (np.minimum(rounds + length, (epoch + 1) * len(self)) - begin) // self.streams
        at = positions - begin
        # A round that the edge of an epoch cuts short ends with single rows.
        return begin + np.where(at < turns * self.streams, interleave(at, self.streams, np.maximum(turns, 1)), at)

    def _get_epoch_table(self, epoch: int) -> _Table:
        return self._epochs.get(epoch, partial(self._make_epoch_table, epoch))

    def _get_unit_table(self, epoch: int, unit: int) -> _Table:
        return self._units.get((epoch, unit), partial(self._make_unit_table, epoch, unit))

    def _make_epoch_table(self, epoch: int) -> _Table:
        n = len(self._unit_sizes)
        units = permutation(n, self.seed, "blocks", epoch) if self.shuffle else np.arange(n, dtype=np.int64)
        return _Table(units, compute_running_sum(self._unit_sizes[units]))

    def _make_unit_table(self, epoch: int, unit: int) -> _Table:
        first = unit * self._blocks_per_unit
        sizes = self._block_sizes(first, first + self._blocks_per_unit)
        n = len(sizes)
        blocks = permutation(n, self.seed, "blocks of a unit", epoch, unit) if self.shuffle else np.arange(n)
        return _Table(first + blocks, compute_running_sum(sizes[blocks]))

    def _permute_block_rows(self, slot: RowSlot) -> list[int]:
        (size,) = self._block_sizes(slot.block, slot.block + 1).tolist()
        rows = -(-(size - self.carry_length(slot.begin)) // self.length)
        if not self.shuffle:
            return list(range(rows))
        return permutation(rows, self.seed, "rows", slot.epoch, slot.block).tolist()


def interleave(k: Ints, streams: int, turn: Ints | int) -> Ints:
    """Map positions `k` [n] that take `turn` rows per stream to positions that take one row per stream."""
    rounds, at = np.divmod(k, streams * turn)
    stream, row = np.divmod(at, turn)
    positions: Ints = np.asarray((rounds * turn + row) * streams + stream, np.int64)
    return positions


def make_row_order(
    sizes: NDArray[np.integer],
    *,
    seed: int,
    streams: Interleave | int,
    shuffle: bool,
    length: int = 1,
    max_units: int = MAX_UNITS,
) -> RowOrder:
    """Make the row order of blocks of `sizes` [n_blocks], in tokens to cut into rows of `length`, or in whole rows."""
    blocks_per_unit = -(-len(sizes) // max_units)
    starts = np.arange(0, len(sizes), blocks_per_unit)
    unit_sizes = np.asarray(sizes if blocks_per_unit == 1 else np.add.reduceat(sizes, starts, dtype=np.int64), np.int64)
    return RowOrder(
        unit_sizes,
        blocks_per_unit,
        partial(_slice_sizes, sizes),  # picklable, for worker processes
        seed=seed,
        streams=streams,
        shuffle=shuffle,
        length=length,
    )


def _slice_sizes(sizes: NDArray[np.integer], begin: int, end: int) -> Ints:
    return sizes[begin:end].astype(np.int64)


def _find(table: _Table, at: Ints) -> tuple[Ints, Ints]:
    entries = table.starts.searchsorted(at, side="right") - 1
    return table.indices[entries], at - table.starts[entries]


def _iter_runs(table: _Table, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (unit or block, first, end) for the offsets `at` … `end` − 1 of a table; first and end count inside it."""
    entry = int(table.starts.searchsorted(at, side="right")) - 1
    while at < end:
        first, after = table.starts[entry : entry + 2].tolist()
        stop = min(after, end)
        if stop > at:
            yield int(table.indices[entry]), at - first, stop - first
        at, entry = stop, entry + 1


def _estimate_bytes(rows: list[int]) -> int:
    return 36 * len(rows)
