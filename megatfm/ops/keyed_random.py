"""Random numbers as pure functions of keys: dropout's masks, and rounding to bfloat16 by chance.

A mask depends on (row, layer, site, token, channel) alone: on no state, rank or order.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

# B batch, T tokens, D channels

# SplitMix64 (Steele et al. 2014): the golden-ratio increment and the multipliers of its finaliser, as signed int64.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
LOW_32_BITS = 2**32 - 1
RATE_STEPS = 2**16
"""A hash of 64 bits serves four channels, so a rate is a multiple of 1/65,536."""


def fold_in(keys: Tensor, value: Tensor | int) -> Tensor:
    """Keys that also depend on `value`, for int64 tensors of one shape or that broadcast."""
    steps = _golden_steps(value) if isinstance(value, Tensor) else _wrapped(value * GOLDEN)
    mixed = (keys ^ steps) + GOLDEN
    mixed = (mixed ^ _shift(mixed, 30)) * MULTIPLIER_1
    mixed = (mixed ^ _shift(mixed, 27)) * MULTIPLIER_2
    return mixed ^ _shift(mixed, 31)


def dropout(x: Tensor, rate: float, keys: Tensor, first: int = 0) -> Tensor:
    """x with elements set to 0 at `rate` and the others scaled to keep the mean.

    x: [..., D] of any floating type; keys: int64 [...], one for each vector of x. first: the number of x's first
    channel, where x is a part of a longer vector.
    """
    threshold = round(rate * RATE_STEPS)
    return (x * keep(keys, x.shape[-1], threshold, first)) * (RATE_STEPS / (RATE_STEPS - threshold))


def keep(keys: Tensor, width: int, threshold: int, first: int = 0) -> Tensor:
    """Booleans [..., width] of the channels from `first` on, false for a share of threshold / 65,536."""
    groups = torch.arange(first // 4, -(-(first + width) // 4), device=keys.device)
    hashes = fold_in(keys[..., None], groups)
    return hashes.view(torch.int16)[..., first % 4 : first % 4 + width] >= threshold - RATE_STEPS // 2


def keep_at(keys: Tensor, channels: Tensor, threshold: int) -> Tensor:
    """Draw `keep` for the channels with these numbers, which broadcast to the keys."""
    hashes = fold_in(keys, channels // 4) >> (16 * (channels % 4))
    return hashes.to(torch.int16) >= threshold - RATE_STEPS // 2


def token_keys(rng_keys_B: Tensor, place: int, indices_T: Tensor) -> Tensor:
    """Keys [B, T] of the tokens at `indices` of their rows, at one place of a layer."""
    return fold_in(fold_in(rng_keys_B, place)[:, None], indices_T)


def uniform(keys: Tensor, width: int) -> Tensor:
    """Numbers [..., width] strictly between 0 and 1, in float64, from int64 keys [...]."""
    hashes = fold_in(keys[..., None], torch.arange(width, device=keys.device))
    return (_shift(hashes, 12) * 2 + 1).double() * 2.0**-53


def _golden_steps(values: Tensor) -> Tensor:
    """values · GOLDEN modulo 2^64, by halves of 32 bits.

    As one product, that of an `arange` becomes the index of a loop times a constant in what inductor writes (torch
    2.13). In C++ that overflows, which gcc 12 takes for something that never happens: loops wrote beyond their ends.
    Triton 3.9 refuses a constant of 64 bits beside an index of 32.
    """
    lower, upper = values & LOW_32_BITS, (values >> 32) & LOW_32_BITS
    crossed = (lower * (GOLDEN >> 32 & LOW_32_BITS) + upper * (GOLDEN & LOW_32_BITS)) & LOW_32_BITS
    return lower * (GOLDEN & LOW_32_BITS) + (crossed << 32)


def _shift(values: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros: int64 would bring in its sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


BF16_STEPS = 2**16
"""A float32 has so many values between two neighbours in bfloat16."""


def stochastic_round(values: Tensor, random: Tensor) -> Tensor:
    """Round finite float32 to bfloat16 up or down by chance (Gupta et al. 2015, section 3.1).

    A value that is a share s of the way from one neighbour to the next, the one further from 0, becomes the next with
    probability s. random: int64, of which the lower 16 bits are used.
    """
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
