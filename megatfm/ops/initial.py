"""Initial weights that depend on (seed, name, row) and on nothing else: no rank, device, layout or order.

Numbers are drawn by NumPy's Philox ziggurat on the CPU, in blocks of rows, so that a rank draws only the blocks
that hold its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed

ROW_BLOCK = 128
"""Rows drawn together: part of the definition of the weights, never to be changed."""


@dataclass(frozen=True)
class Normal:
    """N(0, std²)."""

    std: float


@dataclass(frozen=True)
class TruncatedNormal:
    """N(0, std²), drawn anew beyond ± 2 std: BERT's initialisation."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Uniform in [−bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class Values:
    """Given values, along the first dim."""

    values: tuple[float, ...]


Initial = Normal | TruncatedNormal | Uniform | Constant | Values


def draw(
    initial: Initial, seed: int, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """The block [sizes] at `offsets` of the initial tensor `name` of global `shape`, float32 on the CPU."""
    if isinstance(initial, Constant):
        return torch.full(tuple(sizes), initial.value)
    first, last = offsets[0], offsets[0] + sizes[0]
    if isinstance(initial, Values):
        return torch.tensor(initial.values[first:last]).view(-1, *[1] * (len(sizes) - 1)).expand(*sizes)
    if 0 in sizes:
        return torch.empty(tuple(sizes))
    blocks = range(first // ROW_BLOCK, (last - 1) // ROW_BLOCK + 1)
    rows = np.concatenate([_rows(initial, seed, name, shape, block) for block in blocks])
    rows = rows[first - blocks[0] * ROW_BLOCK :][: sizes[0]]
    columns = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
    return torch.from_numpy(np.ascontiguousarray(rows[(slice(None), *columns)]))


def _rows(
    initial: Normal | TruncatedNormal | Uniform, seed: int, name: str, shape: Sequence[int], block: int
) -> NDArray[np.float32]:
    rows = min(ROW_BLOCK, shape[0] - block * ROW_BLOCK)
    size = (rows, *shape[1:])
    generator = np.random.Generator(keyed.bits(seed, "initial", name, block))
    match initial:
        case Normal(std):
            return generator.standard_normal(size, dtype=np.float32) * np.float32(std)
        case Uniform(bound):
            return ((generator.random(size) * 2 - 1) * bound).astype(np.float32)
        case TruncatedNormal(std):
            values = generator.standard_normal(size, dtype=np.float32)
            while (beyond := np.abs(values) > 2).any():
                values[beyond] = generator.standard_normal(int(beyond.sum()), dtype=np.float32)
            return values * np.float32(std)
