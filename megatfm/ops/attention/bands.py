"""Where a query sees all keys from so many before it to so many after: tiles of queries side by side.

Keys of such tiles are views that overlap, so that none is copied. Tiles begin where documents do, so that none of them
lies in two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.ops.moved import moved

# B batch, N query heads, K key-value heads, g = N / K, T queries, S keys, n tiles of b queries and M keys

LONGEST = 2048
"""Tokens of a run that is looked at causally in tiles; longer ones are left to the fused kernel as a whole."""

SHORTEST = 64
"""Where runs of tokens are shorter on average, tiles cost more than blocks with masks."""


TILES = (64, 128, 256)
"""Queries of a tile: wider ones multiply faster, and look at more keys that not all of them see (docs/LOG.md,
2026-11-23). The widest are of documents that are seen whole."""

ALIGNED = 64
"""Tiles have multiples of so many keys, where there are some to spare."""


@dataclass(frozen=True)
class BandLimits:
    """A query sees all of its document from `left` tokens before it to `right` after it; None: from the first, to the
    last. chunk: and of these, those of its chunk of so many tokens, counted from the document's first. global_tokens:
    places of a document that see all of it, and are seen by all of it; ascending."""

    left: int | None
    right: int | None
    chunk: int | None = None
    global_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Band:
    """Tiles in one row of the batch, or in all (None), each `step` tokens after the one before: the first has `queries`
    from the place `first` on and `keys` from `start` on.

    partial_columns: by their first columns, what of the keys is not seen by all queries, boolean [b, ·]. causal: a
    single tile, whose i-th query sees keys up to the i-th. accumulates: of keys beside those that others have looked at
    for its queries.
    """

    row: int | None
    first: int
    start: int
    queries: int
    keys: int
    count: int = 1
    step: int = 1
    partial_columns: tuple[tuple[int, Tensor], ...] = ()
    causal: bool = False
    accumulates: bool = False

    def part(self, at: int, count: int) -> tuple[int, int, int]:
        """Where queries and keys of tiles from number `at` on begin, and how many tiles there are."""
        return self.first + at * self.step, self.start + at * self.step, min(count, self.count - at)


def bands(
    sides: BandLimits, documents: Sequence[tuple[int | None, int, int]], device: torch.device, *, fused: bool
) -> list[Band] | None:
    """Tiles for documents (row, begin, end); None where they are so short that blocks cost less.

    fused: a kernel serves that holds no scores, so that a tile may be as large as its document.
    """
    runs = [part for document in documents for part in _cut(document, sides.chunk)]
    if len(runs) * SHORTEST > sum(end - begin for _, begin, end in runs):
        return None
    edges: dict[tuple[int, ...], tuple[tuple[int, Tensor], ...]] = {}
    kinds: dict[tuple[int | None, int, int, int, bool], list[int]] = {}
    for row, begin, end in runs:
        for first, last, low, high, causal in _tiles(sides, begin, end, fused):
            kinds.setdefault((row, last - first, high - low, low - first, causal), []).append(first)
    made = []
    for (row, queries, keys, offset, causal), firsts in kinds.items():
        shape = queries, keys, offset
        if shape not in edges:
            edges[shape] = () if causal else _edges(sides, *shape, device)
        for first, step, count in _progressions(sorted(firsts), queries):
            made.append(Band(row, first, first + offset, queries, keys, count, step, edges[shape], causal))
    return made + [band for document in documents for band in _of_tokens(sides, *document, device)]


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


def _tiles(sides: BandLimits, begin: int, end: int, fused: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    """First and last query and key, not with the last, and whether torch's causal order says what is seen."""
    length = end - begin
    left, right = (length if side is None else min(side, length) for side in (sides.left, sides.right))
    whole = left >= length - 1
    if fused and whole and (right >= length - 1 or (right == 0 and length > LONGEST)):
        yield begin, end, begin, end, right < length - 1
        return
    near, middle, far = TILES
    size = far if whole else middle if left + right >= 128 else near
    for first in range(begin, end, size):
        last = min(first + size, end)
        before, after = (-(-side // ALIGNED) * ALIGNED for side in (left, right))
        yield first, last, max(begin, first - before), min(end, last + after), False


def _of_tokens(
    sides: BandLimits, row: int | None, begin: int, end: int, device: torch.device
) -> Iterator[Band]:
    """What tiles leave out of pairs with tokens that see all and are seen by all."""
    places = torch.arange(end - begin, device=device)
    tokens = moved(torch.tensor(sides.global_tokens, dtype=torch.int64), device)
    for low, high in _neighbours([token for token in sides.global_tokens if token < end - begin]):
        far = ~_near(sides, places[:, None], places[low:high])
        of_others = far & ~torch.isin(places, tokens)[:, None]
        of_token = ~_near(sides, places[low:high, None], places)
        at, count = begin + low, high - low
        if of_others.any():
            yield Band(
                row, begin, at, end - begin, count, partial_columns=((0, of_others),), accumulates=True
            )
        if of_token.any():
            yield Band(row, at, begin, count, end - begin, partial_columns=((0, of_token),), accumulates=True)


def _neighbours(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs (begin, end) of ascending places."""
    begin = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[begin], places[at - 1] + 1
            begin = at


def _near(sides: BandLimits, q: Tensor, k: Tensor) -> Tensor:
    near = q == q if sides.left is None else k >= q - sides.left
    return near & (k == k) if sides.right is None else near & (k <= q + sides.right)


def _edges(
    sides: BandLimits, queries: int, keys: int, offset: int, device: torch.device
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
