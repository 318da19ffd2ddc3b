"""Initial weights that depend on (seed, name, row) and on nothing else: no rank, device, layout or order.

Numbers are drawn by NumPy's Philox ziggurat on the CPU, in blocks of rows, so that a rank draws only the blocks
that hold its rows. Each block has a generator of its own, so blocks may be drawn by several threads at once.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed

ROW_BLOCK = 128
"""Rows drawn together: part of the definition of the weights, never to be changed."""
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
class Values(_Scaled):
    """Given values, along the first dim."""

    values: tuple[float, ...]


Initial = Normal | TruncatedNormal | Uniform | Constant | Values


def draw(
    initial: Initial,
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
    if isinstance(initial, Values):
        return torch.tensor(initial.values[first:last]).view(-1, *[1] * (len(sizes) - 1)).expand(*sizes)
    drawn = np.empty(tuple(sizes), np.float32)
    if 0 in sizes:
        return torch.from_numpy(drawn)
    columns = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))

    def fill(block: int) -> None:
        start = block * ROW_BLOCK
        rows = slice(max(first - start, 0), min(last - start, ROW_BLOCK))
        target = drawn[start + rows.start - first : start + rows.stop - first]
        target[...] = _rows(initial, seed, name, shape, block)[(rows, *columns)]

    blocks = range(first // ROW_BLOCK, (last - 1) // ROW_BLOCK + 1)
    if threads == 1 or drawn.size < WORTH_THREADS:
        for block in blocks:
            fill(block)
    else:
        with ThreadPoolExecutor(min(threads, len(blocks))) as pool:  # NumPy draws without Python's lock
            list(pool.map(fill, blocks))
    return torch.from_numpy(drawn)


def _rows(
    initial: Normal | TruncatedNormal | Uniform, seed: int, name: str, shape: Sequence[int], block: int
) -> NDArray[np.float32]:
    rows = min(ROW_BLOCK, shape[0] - block * ROW_BLOCK)
    size = (rows, *shape[1:])
    generator = np.random.Generator(keyed.bits(seed, "initial", name, block))
    match initial:
        case Normal(std):
            values = generator.standard_normal(size, dtype=np.float32)
            values *= np.float32(std)
            return values
        case Uniform(bound):
            return ((generator.random(size) * 2 - 1) * bound).astype(np.float32)
        case TruncatedNormal(std):
            values = generator.standard_normal(size, dtype=np.float32)
            while (beyond := np.abs(values) > 2).any():
                values[beyond] = generator.standard_normal(int(beyond.sum()), dtype=np.float32)
            return values * np.float32(std)
