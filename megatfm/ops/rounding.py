"""Rounding to bfloat16 up or down by chance, so that on average nothing is lost (Gupta et al. 2015, section 3.1).

The chance is a pure function of a key and of where an element is in the whole tensor: no state, rank or order.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megatfm.ops.dropout import fold_in

BF16_STEPS = 2**16
"""A float32 has so many values between two neighbours in bfloat16."""


def stochastic_round(values: Tensor, random: Tensor) -> Tensor:
    """Finite float32 → bfloat16: a value that is a share s of the way from one neighbour to the next becomes the next,
    the one further from 0, with probability s. random: int64, of which the lower 16 bits are used."""
    # The bits of a positive float count up as its value does, and the lower 16 are what bfloat16 leaves out.
    moved = values.view(torch.int32) + (random & (BF16_STEPS - 1)).int()
    return (moved & -BF16_STEPS).view(torch.float32).bfloat16()


def element_hashes(
    key: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device
) -> Tensor:
    """A hash [sizes] for each element of the block at `offsets` of a tensor of global `shape`; key: < 2⁶³."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        stride = prod(shape[dim + 1 :])
        along = torch.arange(offset * stride, (offset + size) * stride, stride, device=device)
        index = index + along.view(-1, *[1] * (len(sizes) - dim - 1))
    return fold_in(index, key)
