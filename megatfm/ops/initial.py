"""Initial weights that depend on (seed, name, row) and on nothing else: no rank, device, layout or order.

Numbers are drawn by NumPy's Philox ziggurat on the CPU, in blocks of rows, so that a rank draws only the blocks
that hold its rows. Each block has a generator of its own, so blocks may be drawn by several threads at once. Of rows
that are large themselves, as experts are, a block is drawn a few at a time, and only those that are asked for are kept.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed

ROW_BLOCK = 128
"""Rows drawn together: part of the definition of the weights, never to be changed."""
PIECE = 2**20
"""Elements of a block that are drawn at a time, unless one row has more: in pieces or at once, they are the same."""
WORTH_THREADS = 2**18
"""Elements below which one thread is as fast as several."""


@dataclass(frozen=True)
class _Scaled:
    width_ratio: float = field(default=1.0, compare=False, kw_only=True)
    """Of a matrix whose inputs grow with the model's width, under muP: base width / width, by which its rate is
    multiplied."""


@dataclass(frozen=True)
class Normal(_Scaled):
    """N(0, std²)."""

    std: float


@dataclass(frozen=True)
class TruncatedNormal(_Scaled):
    """N(0, std²), drawn anew beyond ± 2 std: BERT's initialisation."""

    std: float


@dataclass(frozen=True)
class Uniform(_Scaled):
    """Uniform in [−bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Constant(_Scaled):
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class FixedValues(_Scaled):
    """Given values, along the first dim."""

    values: tuple[float, ...]


InitDistribution = Normal | TruncatedNormal | Uniform | Constant | FixedValues


def draw(
    initial: InitDistribution,
    seed: int,
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    threads: int = 1,
) -> Tensor:
    """The block [sizes] at `offsets` of the initial tensor `name` of global `shape`, float32 on the CPU: the same bits
    for any number of threads."""
    if isinstance(initial, Constant):
        return torch.full(tuple(sizes), initial.value)
    first, last = offsets[0], offsets[0] + sizes[0]
    if isinstance(initial, FixedValues):
        return torch.tensor(initial.values[first:last]).view(-1, *[1] * (len(sizes) - 1)).expand(*sizes)
    drawn = np.empty(tuple(sizes), np.float32)
    if 0 in sizes:
        return torch.from_numpy(drawn)
    columns = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))

    def fill(block: int) -> None:
        start = block * ROW_BLOCK
        rows = slice(max(first - start, 0), min(last - start, ROW_BLOCK))
        target = drawn[start + rows.start - first : start + rows.stop - first]
        count = min(ROW_BLOCK, shape[0] - start)
        generator = np.random.Generator(keyed.bit_generator(seed, "initial", name, block))
        _draw_rows(initial, generator, (count, *shape[1:]), (rows, *columns), target)

    blocks = range(first // ROW_BLOCK, (last - 1) // ROW_BLOCK + 1)
    if threads == 1 or drawn.size < WORTH_THREADS:
        for block in blocks:
            fill(block)
    else:
        with ThreadPoolExecutor(min(threads, len(blocks))) as pool:  # NumPy draws without Python's lock
            list(pool.map(fill, blocks))
    return torch.from_numpy(drawn)


def _draw_rows(
    initial: Normal | TruncatedNormal | Uniform, generator: np.random.Generator, shape: tuple[int, ...],
    kept: tuple[slice, ...], target: NDArray[np.float32],
) -> None:  # fmt: skip
    """Draws the rows of a block of this shape in their order, up to the last that is kept, and puts those into
    `target`. What is drawn anew in a truncated distribution comes after all rows, so that there all are drawn."""
    (rows, *columns), width = kept, prod(shape[1:])
    step = max(1, PIECE // max(width, 1))
    beyond: list[NDArray[np.int64]] = []
    is_truncated = isinstance(initial, TruncatedNormal)
    end = shape[0] if is_truncated else rows.stop
    for start in range(0, end, step):
        values = _next(initial, generator, (min(step, end - start), *shape[1:]))
        if is_truncated:
            beyond.append(np.flatnonzero(np.abs(values) > 2) + start * width)
        first, last = max(rows.start, start), min(rows.stop, start + len(values))
        if first < last:
            target[first - rows.start : last - rows.start] = values[
                (slice(first - start, last - start), *columns)
            ]
    again = np.concatenate(beyond) if beyond else np.empty(0, np.int64)
    while len(again):
        values = generator.standard_normal(len(again), dtype=np.float32)
        places = np.unravel_index(again, shape)
        is_kept = np.all(
            [(at >= x.start) & (at < x.stop) for at, x in zip(places, kept, strict=True)], axis=0
        )
        target[tuple(at[is_kept] - x.start for at, x in zip(places, kept, strict=True))] = values[is_kept]
        again = again[np.abs(values) > 2]
    if not isinstance(initial, Uniform):
        target *= np.float32(initial.std)


def _next(
    initial: Normal | TruncatedNormal | Uniform, generator: np.random.Generator, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """The next numbers; of normal distributions, of those with a standard deviation of 1."""
    if isinstance(initial, Uniform):
        return ((generator.random(shape) * 2 - 1) * initial.bound).astype(np.float32)
    return generator.standard_normal(shape, dtype=np.float32)
