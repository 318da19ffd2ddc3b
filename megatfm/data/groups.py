"""Which blocks are packed together, so that whole sequences fill their rows, and still few blocks are read at once."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

GROUP_ROWS = (8, 12, 18, 27, 40, 64, 128, 256)
"""Rows that a group is to have: at least the first, and more as long as too much of them is padding."""
TARGET_PADDING = 0.015
"""Share of padding with which a group is not made larger."""

Volumes = NDArray[np.int64]


def group_blocks(
    cumulative_lengths: Volumes,
    capacities: Sequence[int],
    count_rows: Callable[[int, int], int],
    is_bin_packed: bool,
) -> Iterator[tuple[int, int]]:
    """Groups of consecutive blocks: where each ends, and its rows.

    cumulative_lengths [n_blocks + 1, sides]: tokens of the sequences before each block. count_rows: the rows that
    blocks from … to make together. Unless sequences `fit`, since each has a row of its own, each block is a group.
    """
    n, begin = len(cumulative_lengths) - 1, 0
    if not is_bin_packed:
        yield from ((block + 1, count_rows(block, block + 1)) for block in range(n))
        return
    while begin < n:
        end, rows = _group(cumulative_lengths, begin, np.array(capacities), count_rows)
        yield end, rows
        begin = end


def _group(
    cumulative_lengths: Volumes,
    begin: int,
    capacities: NDArray[np.int64],
    count_rows: Callable[[int, int], int],
) -> tuple[int, int]:
    """Of groups that get larger and larger, the first with little padding, or that with least."""
    n = len(cumulative_lengths) - 1
    best, tried = (2.0, n, 0), begin
    for least, most in pairwise(GROUP_ROWS):
        first, after = (_first(cumulative_lengths, begin, capacities * rows) for rows in (least, most))
        ends = np.arange(first, max(first + 1, after))
        needed = ((cumulative_lengths[ends] - cumulative_lengths[begin]) / capacities).max(axis=1)
        end = int(ends[(1 - needed / np.maximum(np.ceil(needed), 1)).argmin()])
        if _first(cumulative_lengths, end, capacities * GROUP_ROWS[0]) == n:
            end = n  # a group of few rows would be left
        if end == tried:  # where blocks are large, several steps end with the same one
            continue
        tried = end
        rows = count_rows(begin, end)
        full = float((cumulative_lengths[end] - cumulative_lengths[begin]).sum()) / max(
            1, rows * int(capacities.sum())
        )
        best = min(best, (1 - full, end, rows))
        if best[0] <= TARGET_PADDING or end == n:
            break
    return best[1], best[2]


def _first(cumulative_lengths: Volumes, begin: int, wanted: NDArray[np.int64]) -> int:
    """The first end at which blocks from `begin` have as many tokens as wanted, on one side; or the end of all."""
    sides = range(cumulative_lengths.shape[1])
    ends = [
        int(cumulative_lengths[:, side].searchsorted(cumulative_lengths[begin, side] + wanted[side]))
        for side in sides
    ]
    return min(max(begin + 1, min(ends)), len(cumulative_lengths) - 1)
