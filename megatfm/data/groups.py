"""Which blocks are packed together, so that whole sequences fill their rows, and still few blocks are read at once."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

STEPS = (8, 12, 18, 27, 40, 64, 128, 256)
"""Rows that a group is to have: at least the first, and more as long as too much of them is padding."""
ENOUGH = 0.015
"""Share of padding with which a group is not made larger."""

Volumes = NDArray[np.int64]


def groups_of(
    volumes: Volumes, capacities: Sequence[int], rows_of: Callable[[int, int], int], fit: bool
) -> Iterator[tuple[int, int]]:
    """Groups of consecutive blocks: where each ends, and its rows.

    volumes [n_blocks + 1, sides]: tokens of the sequences before each block. rows_of: the rows that blocks from … to
    make together. Unless sequences `fit`, since each has a row of its own, each block is a group.
    """
    n, begin = len(volumes) - 1, 0
    if not fit:
        yield from ((block + 1, rows_of(block, block + 1)) for block in range(n))
        return
    while begin < n:
        end, rows = _group(volumes, begin, np.array(capacities), rows_of)
        yield end, rows
        begin = end


def _group(
    volumes: Volumes, begin: int, capacities: NDArray[np.int64], rows_of: Callable[[int, int], int]
) -> tuple[int, int]:
    """Of groups that get larger and larger, the first with little padding, or that with least."""
    n = len(volumes) - 1
    best, tried = (2.0, n, 0), begin
    for least, most in pairwise(STEPS):
        first, after = (_first(volumes, begin, capacities * rows) for rows in (least, most))
        ends = np.arange(first, max(first + 1, after))
        needed = ((volumes[ends] - volumes[begin]) / capacities).max(axis=1)
        end = int(ends[(1 - needed / np.maximum(np.ceil(needed), 1)).argmin()])
        if _first(volumes, end, capacities * STEPS[0]) == n:
            end = n  # a group of few rows would be left
        if end == tried:  # where blocks are large, several steps end with the same one
            continue
        tried = end
        rows = rows_of(begin, end)
        full = float((volumes[end] - volumes[begin]).sum()) / max(1, rows * int(capacities.sum()))
        best = min(best, (1 - full, end, rows))
        if best[0] <= ENOUGH or end == n:
            break
    return best[1], best[2]


def _first(volumes: Volumes, begin: int, wanted: NDArray[np.int64]) -> int:
    """The first end at which blocks from `begin` have as many tokens as wanted, on one side; or the end of all."""
    sides = range(volumes.shape[1])
    ends = [int(volumes[:, side].searchsorted(volumes[begin, side] + wanted[side])) for side in sides]
    return min(max(begin + 1, min(ends)), len(volumes) - 1)
