"""Triton kernels that overwrite logits with the gradient of their cross-entropy (as in Liger, Hsu et al. 2024).

Each program processes a row. It reads the logits once for maximum and sum of exponentials (online softmax), and once
more for the gradient, which it writes in place. This moves 3 · M · V elements, about a tenth of torch's operators, and
stores nothing in float32. It takes 5 · M · V operations, counting an exponential as one. A shard of the vocabulary
takes two kernels, as ranks exchange the statistics of their rows in between.

Import it where it runs: Triton comes with torch's GPU builds only. `TRITON_INTERPRET=1` runs it on a CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatfm.ops.cross_entropy import IGNORE, LogitOptions

# M rows, V vocabulary, W logits of a row here: of a shard, or of the full vocabulary

BLOCK = 4096
"""Logits that a program processes at once, 16 for each thread."""
WARPS = 8
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Largest logit while all so far are −∞, which can be subtracted from −∞."""


@triton.jit
def _tanh(x):
    """Compute tanh from exponentials that can't overflow."""
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(x >= 0, 1.0, -1.0) * (1 - e) / (1 + e)


@triton.jit
def _load(logits_W, columns, width, softcap, CAPPED: tl.constexpr):
    """Load logits in float32, capped; −∞ beyond the row's end."""
    x = tl.load(logits_W + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    if CAPPED:
        x = tl.where(columns < width, softcap * _tanh(x / softcap), -float("inf"))
    return x


@triton.jit
def _reduce_row(logits_W, target, width, softcap, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's largest logit, Σ exp(logit − largest), the logit of its target (−∞ if not here) and Σ logit."""
    max_logit = LOWEST
    sum_exp = 0.0
    target_logit = -float("inf")
    sum_logits = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(logits_W, columns, width, softcap, CAPPED)
        new_max = tl.maximum(max_logit, tl.max(x, axis=0))
        sum_exp = sum_exp * tl.exp(max_logit - new_max) + tl.sum(tl.exp(x - new_max), axis=0)
        max_logit = new_max
        target_logit = tl.maximum(target_logit, tl.max(tl.where(columns == target, x, -float("inf")), axis=0))
        if SMOOTHED:
            sum_logits += tl.sum(tl.where(columns < width, x, 0.0), axis=0)
    return max_logit, sum_exp, target_logit, sum_logits


@triton.jit
def _write_gradient(
    logits_W, target, width, max_logit, sum_exp, spread, smoothing, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Overwrite a row. spread: label smoothing of each entry of the vocabulary."""
    scale = 1 / sum_exp
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(logits_W, columns, width, softcap, CAPPED)
        gradient = tl.exp(x - max_logit) * scale - spread - tl.where(columns == target, 1 - smoothing, 0.0)
        if CAPPED:
            gradient *= 1 - (x / softcap) * (x / softcap)
        tl.store(logits_W + columns, gradient.to(logits_W.dtype.element_ty), mask=columns < width)


@triton.jit
def _write_zeros(logits_W, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(logits_W + columns, tl.zeros([BLOCK], logits_W.dtype.element_ty), mask=columns < width)


@triton.jit
def statistics_kernel(
    logits_MW,
    targets_M,
    statistics_SM,
    stride,
    n_rows,
    width,
    first,
    softcap,
    IGNORE: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `reduce_rows`. Accumulates in float32."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_M + row)
    statistics = statistics_SM + row
    if target == IGNORE:  # its logits are not read
        tl.store(statistics, 0.0)
        tl.store(statistics + n_rows, 1.0)
        tl.store(statistics + 2 * n_rows, 0.0)
        if SMOOTHED:
            tl.store(statistics + 3 * n_rows, 0.0)
        return
    max_logit, sum_exp, target_logit, sum_logits = _reduce_row(
        logits_MW + row * stride, target - first, width, softcap, CAPPED, SMOOTHED, BLOCK
    )
    tl.store(statistics, max_logit)
    tl.store(statistics + n_rows, sum_exp)
    tl.store(statistics + 2 * n_rows, target_logit - max_logit)
    if SMOOTHED:
        tl.store(statistics + 3 * n_rows, sum_logits)


@triton.jit
def gradient_kernel(
    logits_MW,
    targets_M,
    losses_M,
    max_logits_M,
    sums_M,
    stride,
    width,
    first,
    softcap,
    smoothing,
    spread,
    IGNORE: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SHARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `to_gradients`, and `write_gradients` if SHARDED. Accumulates in float32."""
    row = tl.program_id(0).to(tl.int64)
    logits_W = logits_MW + row * stride
    target = tl.load(targets_M + row)
    if target == IGNORE:
        _write_zeros(logits_W, width, BLOCK)
        if not SHARDED:
            tl.store(losses_M + row, 0.0)
        return
    if SHARDED:
        max_logit, sum_exp = tl.load(max_logits_M + row), tl.load(sums_M + row)
    else:
        max_logit, sum_exp, target_logit, sum_logits = _reduce_row(
            logits_W, target, width, softcap, CAPPED, SMOOTHED, BLOCK
        )
        spread = smoothing / width
        loss = max_logit + tl.log(sum_exp) - (1 - smoothing) * target_logit - spread * sum_logits
        # A target beyond the vocabulary gives NaN rather than a wrong loss.
        is_valid = (target >= 0) & (target < width)
        tl.store(losses_M + row, tl.where(is_valid, loss, float("nan")))
    _write_gradient(logits_W, target - first, width, max_logit, sum_exp, spread, smoothing, softcap, CAPPED, BLOCK)


def to_gradients(logits_MV: Tensor, targets_M: Tensor, options: LogitOptions) -> Tensor:
    """Return the losses [M] in float32, and overwrite the logits (any row stride) with the gradient of their sum."""
    losses_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
    numbers = logits_MV.stride(0), logits_MV.shape[1], 0, options.softcap or 0.0, options.smoothing, 0.0
    constants = {"SMOOTHED": options.smoothing > 0, "SHARDED": False}
    _launch(gradient_kernel, logits_MV, options, targets_M, losses_M, None, None, *numbers, **constants)
    return losses_M


def reduce_rows(logits_MW: Tensor, targets_M: Tensor, options: LogitOptions, first: int) -> Tensor:
    """Return the statistics of a shard's rows [S, M, 1] in float32: see `cross_entropy.combine_shards`.

    first: row of the vocabulary that the shard begins with.
    """
    is_smoothed = options.smoothing > 0
    statistics_SM1 = logits_MW.new_empty(3 + is_smoothed, len(logits_MW), 1, dtype=torch.float32)
    numbers = logits_MW.stride(0), *logits_MW.shape, first, options.softcap or 0.0
    _launch(statistics_kernel, logits_MW, options, targets_M, statistics_SM1, *numbers, SMOOTHED=is_smoothed)
    return statistics_SM1


def write_gradients(
    logits_MW: Tensor,
    targets_M: Tensor,
    options: LogitOptions,
    first: int,
    max_logits_M1: Tensor,
    sums_M1: Tensor,
    spread: float,
) -> None:
    """Overwrite a shard's logits with their gradient.

    max_logits_M1: the largest logit over all shards. sums_M1: of exp(logit − largest). spread: label smoothing of each
    entry of the vocabulary.
    """
    numbers = logits_MW.stride(0), logits_MW.shape[1], first, options.softcap or 0.0, options.smoothing, spread
    constants = {"SMOOTHED": False, "SHARDED": True}
    _launch(gradient_kernel, logits_MW, options, targets_M, None, max_logits_M1, sums_M1, *numbers, **constants)


def _launch(function: Any, logits: Tensor, options: LogitOptions, *args: Any, **constants: bool) -> None:
    """Launch a kernel with a program for each row."""
    if len(logits):
        function[(len(logits),)](
            logits, *args, IGNORE=IGNORE, CAPPED=bool(options.softcap), BLOCK=BLOCK, num_warps=WARPS, **constants
        )
