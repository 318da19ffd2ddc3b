"""Counter-based random numbers, pure functions of keys: dropout masks and stochastic rounding to bfloat16.

A mask depends on (row, layer, site, token, channel) only, not on state, rank or order.
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
"""One 64-bit hash serves four channels, so rates are multiples of 1/65,536."""


def fold_in(keys: Tensor, value: Tensor | int) -> Tensor:
    """Return new keys that also depend on `value`; int64 tensors that broadcast."""
    steps = _multiply_golden(value) if isinstance(value, Tensor) else wrap_int64(value * GOLDEN)
    mixed = (keys ^ steps).add_(GOLDEN)
    mixed.bitwise_xor_(_shift(mixed, 30)).mul_(MULTIPLIER_1)
    mixed.bitwise_xor_(_shift(mixed, 27)).mul_(MULTIPLIER_2)
    return mixed ^ _shift(mixed, 31)  # a new tensor: that of an empty broadcast may have strides of 0


def dropout(x: Tensor, rate: float, keys: Tensor, first: int = 0) -> Tensor:
    """Set elements of x to 0 at `rate`, and scale the others to keep the mean.

    x: [..., D], any floating dtype. keys: int64 [...], one for each vector. first: index of x's first channel, if x is
    a shard of longer vectors.
    """
    threshold = round(rate * RATE_STEPS)
    return (x * draw_keep_mask(keys, x.shape[-1], threshold, first)).mul_(RATE_STEPS / (RATE_STEPS - threshold))


def draw_keep_mask(keys: Tensor, width: int, threshold: int, first: int = 0) -> Tensor:
    """Draw booleans [..., width] for channels from `first` on, false with probability threshold / 65,536."""
    groups = torch.arange(first // 4, -(-(first + width) // 4), device=keys.device)
    hashes = fold_in(keys[..., None], groups)
    return hashes.view(torch.int16)[..., first % 4 : first % 4 + width] >= threshold - RATE_STEPS // 2


def draw_keep_mask_at(keys: Tensor, channels: Tensor, threshold: int) -> Tensor:
    """Draw `draw_keep_mask` for these channel indices, broadcast to the keys."""
    hashes = fold_in(keys, channels // 4) >> (16 * (channels % 4))
    return hashes.to(torch.int16) >= threshold - RATE_STEPS // 2


def make_token_keys(rng_keys_B: Tensor, site: int, indices_T: Tensor) -> Tensor:
    """Return keys [B, T] for the tokens at these indices of their rows, at one dropout site of a layer."""
    return fold_in(fold_in(rng_keys_B, site)[:, None], indices_T)


def draw_uniform(keys: Tensor, width: int) -> Tensor:
    """Draw uniform float64 values [..., width] strictly between 0 and 1 from int64 keys [...]."""
    hashes = fold_in(keys[..., None], torch.arange(width, device=keys.device))
    return (_shift(hashes, 12) * 2 + 1).double() * 2.0**-53


def _multiply_golden(values: Tensor) -> Tensor:
    """Return values · GOLDEN modulo 2⁶⁴, computed from 32-bit halves in compiled code.

    For a single product with an `arange`, inductor (torch 2.13) generates C++ that multiplies a loop index by a
    constant. Signed overflow is undefined there, and gcc 12 compiled loops that wrote out of bounds. Triton 3.9 also
    rejects a 64-bit constant next to a 32-bit index.
    """
    if not torch.compiler.is_compiling():
        return values * GOLDEN
    lower, upper = values & LOW_32_BITS, (values >> 32) & LOW_32_BITS
    crossed = (lower * (GOLDEN >> 32 & LOW_32_BITS) + upper * (GOLDEN & LOW_32_BITS)) & LOW_32_BITS
    return lower * (GOLDEN & LOW_32_BITS) + (crossed << 32)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift logically to the right; int64's own shift is arithmetic."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def wrap_int64(value: int) -> int:
    """Return the integer modulo 2⁶⁴, as a signed one."""
    return (value + 2**63) % 2**64 - 2**63


BF16_STEPS = 2**16
"""Number of float32 values between two neighbouring bfloat16 values."""


def stochastic_round(values: Tensor, random: Tensor) -> Tensor:
    """Round finite float32 stochastically to bfloat16 (Gupta et al. 2015, section 3.1).

    A value at a fraction s between its bfloat16 neighbours rounds away from 0 with probability s. random: int64; the
    lower 16 bits are used.
    """
    # Float bit patterns are ordered by magnitude, and bfloat16 drops the lower 16 bits.
    moved = values.view(torch.int32) + (random & (BF16_STEPS - 1)).int()
    return (moved & -BF16_STEPS).view(torch.float32).bfloat16()


def hash_elements(
    key: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device
) -> Tensor:
    """Return a hash for each element of the shard [sizes] at `offsets` of a tensor of global `shape`. key: < 2⁶³."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        stride = prod(shape[dim + 1 :])
        along = torch.arange(offset * stride, (offset + size) * stride, stride, device=device)
        index = index + along.view(-1, *[1] * (len(sizes) - dim - 1))
    return fold_in(index, key)
