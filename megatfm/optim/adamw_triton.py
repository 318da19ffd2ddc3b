"""A Triton kernel of AdamW with moments in bfloat16, rounded stochastically (see `optimizers.BF16StateAdamW`).

It reads weight, gradient and moments once, and writes weight and moments: 20 bytes an element. torch's operators move
416, in 30 passes, and hold copies of the moments.

Import it where it runs: Triton comes with torch's GPU builds only. `TRITON_INTERPRET=1` runs it on a CPU.
"""

from collections.abc import Sequence
from math import prod

import triton
import triton.language as tl
from torch import Tensor

from megatfm.engines.interface import ShardLocation
from megatfm.ops import keyed_random

BLOCK, WARPS = 1024, 8
MAX_DIMS = 3
"""Dims by which the kernel finds an element in the full tensor, after neighbours that are not sharded are merged."""
GOLDEN = tl.constexpr(keyed_random.GOLDEN)
MULTIPLIER_1 = tl.constexpr(keyed_random.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(keyed_random.MULTIPLIER_2)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Shift int64 logically to the right."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _fold_in(index, steps):
    """See `keyed_random.fold_in`. steps: the key times GOLDEN."""
    x = (index ^ steps) + GOLDEN
    x = (x ^ _shift(x, 30)) * MULTIPLIER_1
    x = (x ^ _shift(x, 27)) * MULTIPLIER_2
    return x ^ _shift(x, 31)


@triton.jit
def _round(value, random):
    """See `keyed_random.stochastic_round`."""
    bits = value.to(tl.int32, bitcast=True) + (random & 0xFFFF).to(tl.int32)
    return (bits & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def adamw_kernel(
    weights,
    gradients,
    means,
    squares,
    found_inf,
    numel,
    steps,
    first_index,
    size_1,
    size_2,
    stride_0,
    stride_1,
    decay_factor,
    step_size,
    beta1,
    beta2,
    root_correction,
    eps,
    CAN_SKIP: tl.constexpr,
    IS_RUN: tl.constexpr,
    IS_LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `update`. An element has the index first_index + i₀·stride_0 + i₁·stride_1 + i₂ in the full tensor.

    IS_RUN: the block is a run of elements. IS_LARGE: its elements are too many for 32-bit divisions, which are faster.
    """
    if CAN_SKIP:  # noqa: SIM102 (Triton's `and` evaluates both sides)
        if tl.load(found_inf) == 1:
            return
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_element = i < numel
    weight = tl.load(weights + i, mask=is_element)
    gradient = tl.load(gradients + i, mask=is_element)
    mean = tl.load(means + i, mask=is_element).to(tl.float32)
    square = tl.load(squares + i, mask=is_element).to(tl.float32)
    mean = mean + (1 - beta1) * (gradient - mean)
    square = beta2 * square + (1 - beta2) * gradient * gradient
    weight = weight * decay_factor - step_size * mean / (tl.sqrt(square) / root_correction + eps)
    index = first_index + i
    if not IS_RUN:
        place = i if IS_LARGE else i.to(tl.int32)
        row, column = place // size_2, place % size_2
        index = first_index + (row // size_1).to(tl.int64) * stride_0 + (row % size_1).to(tl.int64) * stride_1 + column
    random = _fold_in(index, steps)
    tl.store(weights + i, weight, mask=is_element)
    tl.store(means + i, _round(mean, random), mask=is_element)
    tl.store(squares + i, _round(square, random >> 16), mask=is_element)


def update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    location: ShardLocation,
    *,
    key: int,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    found_inf: Tensor | None,
) -> None:
    """Update a weight's block (float32) and its moments (bfloat16), contiguous, in place.

    location: of the block in its full tensor. key: of the rounding, < 2⁶³. step: from 1. found_inf: if it is 1, nothing
    changes. Raises ValueError for a block that is sharded along too many dims.
    """
    (size_2, _), (size_1, stride_1), (_, stride_0) = _find_strides(location, tuple(weight.shape))
    first_index = sum(offset * prod(location.shape[dim + 1 :]) for dim, offset in enumerate(location.offsets))
    beta1, beta2 = betas
    adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
        weight,
        gradient.contiguous(),
        mean,
        square,
        found_inf,
        weight.numel(),
        keyed_random.wrap_int64(key * keyed_random.GOLDEN),
        first_index,
        size_1,
        size_2,
        stride_0,
        stride_1,
        1 - lr * weight_decay,
        lr / (1 - beta1**step),
        beta1,
        beta2,
        (1 - beta2**step) ** 0.5,
        eps,
        CAN_SKIP=found_inf is not None,
        IS_RUN=size_2 == weight.numel(),
        IS_LARGE=weight.numel() >= 2**31,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def _find_strides(location: ShardLocation, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the size and the stride in the full tensor of three dims, the last one first, whose stride is 1."""
    dims: list[tuple[int, int]] = []
    is_whole = False  # whether the block has all of the dims that were merged last
    for dim in range(len(sizes) - 1, -1, -1):
        if dims and is_whole:
            size, stride = dims.pop()
            dims.append((size * sizes[dim], stride))
        else:
            dims.append((sizes[dim], prod(location.shape[dim + 1 :])))
        is_whole = sizes[dim] == location.shape[dim]
    if len(dims) > MAX_DIMS:
        raise ValueError(
            f"{location.name} of shape {list(location.shape)} is sharded along more than {MAX_DIMS - 1} of its dims"
        )
    return [*dims, *[(1, 0)] * (MAX_DIMS - len(dims))]
