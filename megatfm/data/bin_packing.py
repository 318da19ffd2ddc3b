"""Bin packing: assigns whole sequences to rows, and groups consecutive blocks that are packed together.

Best fit decreasing assigns sequences to rows. Groups are large enough for their sequences to fill rows, and small
enough that few blocks are read at once.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.data.sequences import PackingObjective, needs_own_row

GROUP_ROWS = (8, 12, 18, 27, 40, 64, 128, 256)
"""Target rows of a group, tried in turn: the first, then larger ones while the share of padding is too high."""
TARGET_PADDING = 0.015
"""Share of padding that is low enough to stop enlarging a group."""
MUCH_PADDING = 0.05
"""Share of padding above which the log warns."""
ROWS = (2048, 8192, 32_768, 131_072, 1_048_576)
PADDING_SAMPLE = 2**16
"""Number of documents that `describe_padding` looks at."""
Volumes = NDArray[np.int64]


def assign_rows(
    objective: PackingObjective, lengths: NDArray[np.int64], capacities: Sequence[int]
) -> NDArray[np.int64]:
    """Return the row index [P] of each sequence of `lengths` [P, sides]: one row each, or best fit decreasing."""
    return np.arange(len(lengths)) if needs_own_row(objective) else best_fit_decreasing(lengths, capacities)


def best_fit_decreasing(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    """Return the row index [P] of each sequence of `lengths` [P, sides], packed by best fit decreasing.

    The longest sequence comes first; each goes to the row that it leaves with the least room. This needs at most
    11/9 of the optimal row count plus a constant (Johnson et al. 1974). With two sides, room and length are shares
    of each side's row length. Rows are numbered in the order of their first sequences.
    """
    rows = np.arange(len(lengths))
    # A sequence that fills one side cannot share its row.
    shared = np.flatnonzero((lengths != np.array(capacities)).all(axis=1))
    fit = _fit_one_side if len(capacities) == 1 else _fit_sides
    rows[shared] = len(lengths) + fit(lengths[shared], capacities)
    _, first, row_indices = np.unique(rows, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[row_indices]


def _fit_one_side(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    order = np.argsort(-lengths[:, 0], kind="stable")
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    n_rows = 0
    for chunk, length in zip(order.tolist(), lengths[order, 0].tolist(), strict=True):
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
        else:
            room, row = capacities[0], n_rows
            n_rows += 1
        rows[chunk] = row
        if room > length:
            insort(open_rows, (room - length, row))
    return rows


def _fit_sides(lengths: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    shares = lengths / np.array(capacities)
    rows = np.empty(len(lengths), np.int64)
    room = np.tile(np.array(capacities, np.int64), (len(lengths), 1))
    free = np.full(len(lengths), float(len(capacities)))
    n_rows = 0
    for chunk in np.argsort(-shares.max(axis=1), kind="stable").tolist():
        fitting_rows = np.flatnonzero((room[:n_rows] >= lengths[chunk]).all(axis=1))
        row = int(fitting_rows[free[fitting_rows].argmin()]) if len(fitting_rows) else n_rows
        n_rows = max(n_rows, row + 1)
        rows[chunk] = row
        room[row] -= lengths[chunk]
        free[row] -= shares[chunk].sum()
    return rows


def group_blocks(
    cumulative_lengths: Volumes, capacities: Sequence[int], count_rows: Callable[[int, int], int], is_bin_packed: bool
) -> Iterator[tuple[int, int]]:
    """Yield (end block, row count) of each group of consecutive blocks.

    cumulative_lengths [n_blocks + 1, sides]: tokens of the sequences before each block. count_rows: returns the rows
    that blocks `begin` to `end` − 1 make together. Without `is_bin_packed` each sequence has its own row, and each
    block is a group.
    """
    n, begin = len(cumulative_lengths) - 1, 0
    if not is_bin_packed:
        yield from ((block + 1, count_rows(block, block + 1)) for block in range(n))
        return
    while begin < n:
        end, rows = _choose_group(cumulative_lengths, begin, np.array(capacities), count_rows)
        yield end, rows
        begin = end


def _choose_group(
    cumulative_lengths: Volumes, begin: int, capacities: NDArray[np.int64], count_rows: Callable[[int, int], int]
) -> tuple[int, int]:
    """Try larger and larger groups; return the first whose padding is below `TARGET_PADDING`, else the best."""
    n = len(cumulative_lengths) - 1
    best, tried = (2.0, n, 0), begin
    for min_rows, max_rows in pairwise(GROUP_ROWS):
        first, after = (_find_group_end(cumulative_lengths, begin, capacities * rows) for rows in (min_rows, max_rows))
        ends = np.arange(first, max(first + 1, after))
        needed = ((cumulative_lengths[ends] - cumulative_lengths[begin]) / capacities).max(axis=1)
        end = int(ends[(1 - needed / np.maximum(np.ceil(needed), 1)).argmin()])
        if _find_group_end(cumulative_lengths, end, capacities * GROUP_ROWS[0]) == n:
            end = n  # otherwise the last group would have too few rows
        if end == tried:  # where blocks are large, several steps end with the same one
            continue
        tried = end
        rows = count_rows(begin, end)
        full = float((cumulative_lengths[end] - cumulative_lengths[begin]).sum()) / max(1, rows * int(capacities.sum()))
        best = min(best, (1 - full, end, rows))
        if best[0] <= TARGET_PADDING or end == n:
            break
    return best[1], best[2]


def _find_group_end(cumulative_lengths: Volumes, begin: int, targets: NDArray[np.int64]) -> int:
    """Return the first end at which the blocks from `begin` reach the target tokens on one side, else the last."""
    sides = range(cumulative_lengths.shape[1])
    ends = [
        int(cumulative_lengths[:, side].searchsorted(cumulative_lengths[begin, side] + targets[side])) for side in sides
    ]
    return min(max(begin + 1, min(ends)), len(cumulative_lengths) - 1)


def measure_padding(lengths: NDArray[np.int64], blocks: NDArray[np.int64], row: int) -> tuple[float, float]:
    """Return the share of padding in rows of `row` tokens: first with documents cut at row ends, then kept whole.

    lengths [D]: tokens of each document plus one for its end; blocks [B + 1]: first document of each block.
    """
    total = int(lengths.sum())
    counts = np.maximum(-(-lengths // row), 1)
    document_of_chunk = np.repeat(np.arange(len(lengths)), counts)
    chunk_indices = np.arange(len(document_of_chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.minimum(lengths[document_of_chunk] - chunk_indices * row, row)[:, None]
    starts = np.concatenate([[0], np.cumsum(counts)])[blocks]

    def count_rows(begin: int, end: int) -> int:
        return int(best_fit_decreasing(chunks[starts[begin] : starts[end]], (row,)).max(initial=-1)) + 1

    volumes = np.concatenate([[0], np.cumsum(chunks)])[starts][:, None]
    rows = sum(row_count for _, row_count in group_blocks(volumes, (row,), count_rows, is_bin_packed=True))
    return 1 - total / (-(-total // row) * row), 1 - total / (rows * row)


def describe_padding(corpus: Corpus) -> dict[str, str]:
    """Describe the share of padding in rows of usual lengths, measured on the first documents of the corpus."""
    blocks = corpus.blocks[: max(2, int(corpus.blocks.searchsorted(PADDING_SAMPLE, "right")))]
    lengths, lines = corpus.lengths(0, len(blocks) - 1) + 1, {}
    for row in (size for size in ROWS if size <= int(lengths.sum())):
        cut, unsplit = measure_padding(lengths, blocks, row)
        much = ": documents don't fill such rows" if unsplit > MUCH_PADDING else ""
        lines[f"rows of {row:,}"] = (
            f"{100 * cut:.1f} % padding where documents are cut, {100 * unsplit:.1f} % where whole{much}"
        )
    return lines
