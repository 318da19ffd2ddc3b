"""A Triton kernel: logits become their cross-entropy's gradient where they lie (as in Liger, Hsu et al. 2024).

A program takes a row. It reads the logits once for the greatest and the sum of exponentials together, and once more
for the gradient, which it writes over them: 3 · M · V elements move, where torch's operators move about ten times as
many, and nothing in float32 is ever stored. 5 · M · V operations, exponentials counted as one.

Imported where it runs: Triton comes with torch's builds for GPUs only. `TRITON_INTERPRET=1` runs it on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# M rows, V vocabulary

BLOCK = 4096
"""Logits that a program holds at once: 16 of each of its threads."""
WARPS = 8


@triton.jit
def kernel(
    logits_MV,
    targets_M,
    losses_M,
    stride,
    vocabulary,
    softcap,
    smoothing,
    IGNORE: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `to_gradients`. Sums are float32's."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_MV + row * stride
    target = tl.load(targets_M + row)
    columns = tl.arange(0, BLOCK)
    if target == IGNORE:
        for start in range(0, vocabulary, BLOCK):
            at = start + columns
            tl.store(logits + at, tl.zeros([BLOCK], logits_MV.dtype.element_ty), mask=at < vocabulary)
        tl.store(losses_M + row, 0.0)
        return

    most = -float("inf")
    total = 0.0
    together = 0.0
    at_target = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        if CAPPED:
            # tanh by exponentials, of which none overflows; −∞, beyond the vocabulary, stays −∞.
            e = tl.exp(-2 * tl.abs(x) / softcap)
            capped = tl.where(x >= 0, 1.0, -1.0) * softcap * (1 - e) / (1 + e)
            x = tl.where(at < vocabulary, capped, -float("inf"))
        higher = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), axis=0)
        most = higher
        at_target += tl.sum(tl.where(at == target, x, 0.0), axis=0)
        if SMOOTHED:
            together += tl.sum(tl.where(at < vocabulary, x, 0.0), axis=0)
    lse = most + tl.log(total)
    spread = smoothing / vocabulary
    loss = lse - (1 - smoothing) * at_target - spread * together
    # A target beyond the vocabulary is found nowhere: not a number, rather than a wrong one.
    is_valid = (target >= 0) & (target < vocabulary)
    tl.store(losses_M + row, tl.where(is_valid, loss, float("nan")))

    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        slope = 1.0
        if CAPPED:
            e = tl.exp(-2 * tl.abs(x) / softcap)
            share = tl.where(x >= 0, 1.0, -1.0) * (1 - e) / (1 + e)
            slope = 1 - share * share
            x = softcap * share
        gradient = tl.exp(x - lse) - spread - tl.where(at == target, 1 - smoothing, 0.0)
        tl.store(logits + at, (gradient * slope).to(logits_MV.dtype.element_ty), mask=at < vocabulary)


def to_gradients(
    logits_MV: Tensor, targets_M: Tensor, *, ignore: int, softcap: float | None, smoothing: float
) -> Tensor:
    """The losses [M] in float32; the logits, rows of any stride, become the gradients of the losses' sum."""
    losses_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
    if len(logits_MV):
        kernel[(len(logits_MV),)](
            logits_MV,
            targets_M,
            losses_M,
            logits_MV.stride(0),
            logits_MV.shape[1],
            softcap or 0.0,
            smoothing,
            IGNORE=ignore,
            CAPPED=bool(softcap),
            SMOOTHED=smoothing > 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses_M
