"""Where a query sees all keys from so many before it to so many after: tiles of queries side by side.

Keys of such tiles are views that overlap, so that none is copied. Tiles begin where documents do, so that none of them
lies in two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# B batch, N query heads, K key-value heads, g = N / K, T queries, S keys, n tiles of b queries and M keys

LONGEST = 2048
"""Tokens of a run that is looked at causally in tiles; longer ones are left to the fused kernel as a whole."""

SHORTEST = 64
"""Where runs of tokens are shorter on average, tiles cost more than blocks with masks."""


@dataclass(frozen=True)
class Sides:
    """A query sees all of its document from `left` tokens before it to `right` after it; None: from the first, to the
    last. cut: and of these, those of its chunk of so many tokens, counted from the document's first."""

    left: int | None
    right: int | None
    cut: int | None = None


@dataclass(frozen=True)
class Band:
    """Tiles in one row of the batch, or in all (None), each `step` tokens after the one before: the first has `queries`
    from the place `first` on and `keys` from `start` on.

    edges: by their first columns, what of the keys is not seen by all queries, boolean [b, ·]. causal: a single tile,
    whose i-th query sees keys up to the i-th. more: of keys beside those that others have looked at for its queries.
    """

    row: int | None
    first: int
    start: int
    queries: int
    keys: int
    count: int = 1
    step: int = 1
    edges: tuple[tuple[int, Tensor], ...] = ()
    causal: bool = False
    more: bool = False

    def part(self, at: int, count: int) -> tuple[int, int, int]:
        """Where queries and keys of tiles from number `at` on begin, and how many tiles there are."""
        return self.first + at * self.step, self.start + at * self.step, min(count, self.count - at)


def bands(
    sides: Sides, runs: Sequence[tuple[int | None, int, int]], device: torch.device
) -> list[Band] | None:
    """Tiles for documents (row, begin, end); None where they are so short that blocks cost less."""
    runs = [part for run in runs for part in _cut(run, sides.cut)]
    if len(runs) * SHORTEST > sum(end - begin for _, begin, end in runs):
        return None
    edges: dict[tuple[int, ...], tuple[tuple[int, Tensor], ...]] = {}
    kinds: dict[tuple[int | None, int, int, int, bool], list[int]] = {}
    for row, begin, end in runs:
        for first, last, low, high, causal in _tiles(sides, begin, end):
            kinds.setdefault((row, last - first, high - low, low - first, causal), []).append(first)
    made = []
    for (row, queries, keys, offset, causal), firsts in kinds.items():
        shape = queries, keys, offset
        if shape not in edges:
            edges[shape] = () if causal else _edges(sides, *shape, device)
        for first, step, count in _progressions(sorted(firsts), queries):
            made.append(Band(row, first, first + offset, queries, keys, count, step, edges[shape], causal))
    return made


def tiles(x: Tensor, first: int, size: int, count: int, step: int) -> Tensor:
    """[…, T, H] → […, n, size, H], a view."""
    over = x.narrow(-2, first, (count - 1) * step + size)
    return over.unfold(-2, size, step).transpose(-1, -2)


def add_tiles(total: Tensor, parts: Tensor, first: int, step: int) -> None:
    """Adds [X, n, size, H] to where these lie in [X, T, H]; they may overlap."""
    count, size = parts.shape[1:3]
    width = size if count == 1 else step
    for at in range(0, size, width):
        part = parts[:, :, at : at + width]
        tiles(total, first + at, part.shape[2], count, step).add_(part)


def _cut(run: tuple[int | None, int, int], size: int | None) -> Iterator[tuple[int | None, int, int]]:
    row, begin, end = run
    for at in range(begin, end, size or end - begin):
        yield row, at, min(at + (size or end - begin), end)


def _tiles(sides: Sides, begin: int, end: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """First and last query and key, not with the last, and whether torch's causal order says what is seen."""
    length = end - begin
    left, right = (length if side is None else min(side, length) for side in (sides.left, sides.right))
    whole = left >= length - 1
    if whole and (right >= length - 1 or (right == 0 and length > LONGEST)):
        yield begin, end, begin, end, right < length - 1
        return
    size = 256 if left + right >= 512 or whole else 128 if left + right >= 128 else 64
    for first in range(begin, end, size):
        last = min(first + size, end)
        yield first, last, max(begin, first - left), min(end, last + right), False


def _edges(
    sides: Sides, queries: int, keys: int, offset: int, device: torch.device
) -> tuple[tuple[int, Tensor], ...]:
    """What the first and the last queries see says which keys are seen by all."""
    q = torch.arange(queries, device=device)[:, None]
    begin = 0 if sides.left is None else max(0, min(keys, queries - 1 - sides.left - offset))
    end = keys if sides.right is None else max(begin, min(keys, sides.right - offset + 1))
    made = []
    for low, high in ((0, begin), (end, keys)):
        if low < high:
            k = torch.arange(low, high, device=device) + offset
            left, right = (
                keys + queries + abs(offset) if x is None else x for x in (sides.left, sides.right)
            )
            made.append((low, (k >= q - left) & (k <= q + right)))
    return tuple(made)


def _progressions(firsts: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """The first, the step and the number of places that are equally far from one another, at least `size`."""
    at = 0
    while at < len(firsts):
        step = firsts[at + 1] - firsts[at] if at + 1 < len(firsts) else size
        beyond = at + 1
        while beyond < len(firsts) and firsts[beyond] - firsts[beyond - 1] == step:
            beyond += 1
        yield firsts[at], step, beyond - at
        at = beyond
