"""Plan attention on a CPU under masks by which a query sees a band of keys around it: bands of equal tiles.

Keys of neighbouring tiles are overlapping views, so none is copied, and no tile crosses the boundary of a document.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.ops.attention.mask import Band, BandLimits
from megatfm.ops.transfer import move_to_device

# B batch, N query heads, K key-value heads, g = N / K, T queries, S keys, n tiles of b queries and M keys

MAX_CAUSAL_TILE = 2048
"""Longest document that causal attention computes in tiles; the fused kernel takes longer ones as a whole."""

MIN_MEAN_LENGTH = 64
"""Mean length of documents below which tiles cost more than blocks with masks."""

TILE_SIZES = (64, 128, 256)
"""Queries of a tile: larger tiles multiply faster, but compute more hidden pairs (docs/LOG.md, 2026-11-23). The largest
are for documents that are seen fully."""

KEY_ALIGNMENT = 64
"""Tiles have a multiple of this many keys, if there are enough."""


def make_bands(
    limits: BandLimits, documents: Sequence[tuple[int | None, int, int]], device: torch.device, *, fused: bool
) -> list[Band] | None:
    """Return the bands of documents (row, begin, end); None if these are so short that blocks cost less.

    fused: the kernel holds no scores, so that a tile may be as large as its document.
    """
    spans = [span for document in documents for span in _split_into_chunks(document, limits.chunk)]
    if len(spans) * MIN_MEAN_LENGTH > sum(end - begin for _, begin, end in spans):
        return None
    edge_masks: dict[tuple[int, ...], tuple[tuple[int, Tensor], ...]] = {}
    first_queries: dict[tuple[int | None, int, int, int, bool], list[int]] = {}  # by kind of tile
    for row, begin, end in spans:
        for first, last, low, high, causal in _iter_tile_bounds(limits, begin, end, fused):
            kind = row, last - first, high - low, low - first, causal
            first_queries.setdefault(kind, []).append(first)
    result = []
    for (row, queries, keys, offset, causal), firsts in first_queries.items():
        shape = queries, keys, offset
        if shape not in edge_masks:
            edge_masks[shape] = () if causal else _make_edge_masks(limits, *shape, device)
        for first, step, count in _iter_progressions(sorted(firsts), queries):
            result.append(Band(row, first, first + offset, queries, keys, count, step, edge_masks[shape], causal))
    return result + [band for document in documents for band in _iter_global_bands(limits, *document, device)]


class _Run(NamedTuple):
    """Consecutive tokens of a row. first, end: row indices. offset: index of the first one among the given tokens."""

    first: int
    end: int
    offset: int


def make_shard_bands(
    documents: Sequence[tuple[int | None, int, int]], q_indices: Tensor, k_indices: Tensor, *, causal: bool
) -> list[Band] | None:
    """Return the bands of some queries and keys of rows that see their documents; None if these are so short that
    blocks cost less.

    documents: row, begin, end of each. q_indices, k_indices: row indices, ascending, in host memory. causal: without
    later keys. Each band is fully visible, or one causal square; some queries may be in none.
    """
    has_documents = any(row is not None for row, _, _ in documents)
    if has_documents and len(documents) * MIN_MEAN_LENGTH > sum(end - begin for _, begin, end in documents):
        return None
    bands: list[Band] = []
    key_runs, query_runs = _find_runs(k_indices.numpy()), _find_runs(q_indices.numpy())
    for row, begin, end in documents:
        for run in query_runs:
            first, last = max(run.first, begin), min(run.end, end)
            visited: list[tuple[int, int]] = []
            for low, high, key in _iter_visible_keys(key_runs, first, last, begin, end, causal=causal):
                for start, stop, is_square in _split_queries(first, last, low, high, causal=causal):
                    accumulates = any(start < b and a < stop for a, b in visited)
                    visited.append((start, stop))
                    sizes = stop - start, high - low
                    query = start - run.first + run.offset
                    bands.append(Band(row, query, key, *sizes, causal=is_square, accumulates=accumulates))
    return bands


def _split_queries(first: int, last: int, low: int, high: int, *, causal: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield begin and end of queries that see keys `low` to `high` − 1, and whether as a causal square.

    Queries `first` to `last` − 1 see all of these keys, unless the keys are themselves among them and `causal`.
    """
    if not causal or low < first:
        yield first, last, False
        return
    yield low, high, True
    if high < last:
        yield high, last, False


def _find_runs(numbers: NDArray[np.int64]) -> list[_Run]:
    """Return the runs of consecutive numbers in ascending ones."""
    if not len(numbers):
        return []
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    return [_Run(int(numbers[a]), int(numbers[b - 1]) + 1, a) for a, b in pairwise(starts)]


def _iter_visible_keys(
    key_runs: Sequence[_Run], first: int, last: int, begin: int, end: int, *, causal: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and index among the keys of what queries `first` to `last` − 1 of a document see.

    Under causal attention these are keys before all queries, and keys that are themselves among the queries.
    """
    ranges = [(begin, first), (first, last)] if causal else [(begin, end)]
    if first < last:
        for run in key_runs:
            for a, b in ranges:
                low, high = max(run.first, a), min(run.end, b)
                if low < high:
                    yield low, high, low - run.first + run.offset


def view_tiles(x: Tensor, first: int, size: int, count: int, step: int) -> Tensor:
    """Return […, T, H] as […, n, size, H], a view of `count` tiles, each `step` tokens after the previous one."""
    windows = x.narrow(-2, first, (count - 1) * step + size)
    return windows.unfold(-2, size, step).transpose(-1, -2)


def add_tiles(total: Tensor, tiles: Tensor, first: int, step: int) -> None:
    """Add tiles [X, n, size, H] to their tokens of [X, T, H], in place; they may overlap."""
    count, size = tiles.shape[1:3]
    width = size if count == 1 else step
    for start in range(0, size, width):
        columns = tiles[:, :, start : start + width]
        view_tiles(total, first + start, columns.shape[2], count, step).add_(columns)


def _split_into_chunks(
    document: tuple[int | None, int, int], size: int | None
) -> Iterator[tuple[int | None, int, int]]:
    row, begin, end = document
    for start in range(begin, end, size or end - begin):
        yield row, start, min(start + (size or end - begin), end)


def _iter_tile_bounds(
    limits: BandLimits, begin: int, end: int, fused: bool
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield begin and end of queries, begin and end of keys, and whether the built-in causal mask is the tile's."""
    length = end - begin
    left, right = (length if limit is None else min(limit, length) for limit in (limits.left, limits.right))
    is_full = left >= length - 1
    if fused and is_full and (right >= length - 1 or (right == 0 and length > MAX_CAUSAL_TILE)):
        yield begin, end, begin, end, right < length - 1
        return
    small, medium, large = TILE_SIZES
    size = large if is_full else medium if left + right >= 128 else small
    for first in range(begin, end, size):
        last = min(first + size, end)
        n_before, n_after = (-(-limit // KEY_ALIGNMENT) * KEY_ALIGNMENT for limit in (left, right))
        yield first, last, max(begin, first - n_before), min(end, last + n_after), False


def _iter_global_bands(
    limits: BandLimits, row: int | None, begin: int, end: int, device: torch.device
) -> Iterator[Band]:
    """Yield bands of the pairs with global tokens that lie outside of the band around each query."""
    positions = torch.arange(end - begin, device=device)
    tokens = move_to_device(torch.tensor(limits.global_tokens, dtype=torch.int64), device)
    local_tokens = np.array([token for token in limits.global_tokens if token < end - begin], np.int64)
    for low, high, _ in _find_runs(local_tokens):
        is_outside = ~_is_in_band(limits, positions[:, None], positions[low:high])
        to_global = is_outside & ~torch.isin(positions, tokens)[:, None]
        from_global = ~_is_in_band(limits, positions[low:high, None], positions)
        first, count, length = begin + low, high - low, end - begin
        if to_global.any():
            yield Band(row, begin, first, length, count, partial_columns=((0, to_global),), accumulates=True)
        if from_global.any():
            yield Band(row, first, begin, count, length, partial_columns=((0, from_global),), accumulates=True)


def _is_in_band(limits: BandLimits, q: Tensor, k: Tensor) -> Tensor:
    in_window = q == q if limits.left is None else k >= q - limits.left
    return in_window & (k == k) if limits.right is None else in_window & (k <= q + limits.right)


def _make_edge_masks(
    limits: BandLimits, queries: int, keys: int, offset: int, device: torch.device
) -> tuple[tuple[int, Tensor], ...]:
    """Return (first column, mask) of the keys of a tile that not all of its queries see. offset: first key − first
    query."""
    q = torch.arange(queries, device=device)[:, None]
    begin = 0 if limits.left is None else max(0, min(keys, queries - 1 - limits.left - offset))
    end = keys if limits.right is None else max(begin, min(keys, limits.right - offset + 1))
    unlimited = keys + queries + abs(offset)
    left, right = (unlimited if limit is None else limit for limit in (limits.left, limits.right))
    masks = []
    for low, high in ((0, begin), (end, keys)):
        if low < high:
            k = torch.arange(low, high, device=device) + offset
            masks.append((low, (k >= q - left) & (k <= q + right)))
    return tuple(masks)


def _iter_progressions(firsts: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, step, count) of arithmetic progressions of ascending numbers. size: the step of a single one."""
    start = 0
    while start < len(firsts):
        step = firsts[start + 1] - firsts[start] if start + 1 < len(firsts) else size
        end = start + 1
        while end < len(firsts) and firsts[end] - firsts[end - 1] == step:
            end += 1
        yield firsts[start], step, end - start
        start = end
