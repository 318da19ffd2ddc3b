"""Initial weights that depend on (seed, name, row) and on nothing else: no rank, device, layout or order.

Numbers are drawn by NumPy's Philox ziggurat on the CPU, in blocks of rows, so that a rank draws only the blocks
that hold its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatfm import keyed

ROW_BLOCK = 128
"""Rows drawn together: part of the definition of the weights, never to be changed."""


@dataclass(frozen=True)
class Normal:
    """N(0, std²)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


Initial = Normal | Constant


def draw(
    initial: Initial, seed: int, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """The block [sizes] at `offsets` of the initial tensor `name` of global `shape`, float32 on the CPU."""
    if isinstance(initial, Constant):
        return torch.full(tuple(sizes), initial.value)
    first, last = offsets[0], offsets[0] + sizes[0]
    if 0 in sizes:
        return torch.empty(tuple(sizes))
    blocks = range(first // ROW_BLOCK, (last - 1) // ROW_BLOCK + 1)
    rows = np.concatenate([_rows(seed, name, shape, block) for block in blocks])
    rows = rows[first - blocks[0] * ROW_BLOCK :][: sizes[0]]
    columns = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
    return torch.from_numpy(np.ascontiguousarray(rows[(slice(None), *columns)])) * initial.std


def _rows(seed: int, name: str, shape: Sequence[int], block: int) -> np.ndarray:
    rows = min(ROW_BLOCK, shape[0] - block * ROW_BLOCK)
    generator = np.random.Generator(keyed.bits(seed, "initial", name, block))
    return generator.standard_normal((rows, *shape[1:]), dtype=np.float32)
