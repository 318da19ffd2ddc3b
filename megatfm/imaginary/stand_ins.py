"""Stand-ins for attention's kernels on the imaginary GPU, which allocate and save as much, and count their runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatfm.imaginary.device import ImaginaryGPU
from megatfm.ops.attention import kernels

FUSED = ("fused", "varlen", "flex")
"""Kernels without a tensor of scores."""


class _FusedAttention(torch.autograd.Function):
    """Stand-in for a fused kernel. Saves q, k, v, biases, its output (a token's heads are neighbours), and for each
    query its log-sum-exp in float32. count_run: called by each pass."""

    @staticmethod
    def forward(ctx, q_BNTH, k_BKSH, v_BKSH, count_run, *biases):  # type: ignore[no-untyped-def]
        rows, heads, length, _ = q_BNTH.shape
        out_BNTV = q_BNTH.new_empty(rows, length, heads, v_BKSH.shape[-1]).transpose(1, 2)
        lse_BNT = q_BNTH.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, *biases, out_BNTV, lse_BNT)
        ctx.count_run = count_run
        count_run()
        return out_BNTV

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.count_run()
        *inputs, _, _ = ctx.saved_tensors
        q, k, v, *biases = (
            torch.empty_like(x) if needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad[:3] + ctx.needs_input_grad[4:], strict=True)
        )
        return q, k, v, None, *biases


@contextmanager
def replace_fused_attention(gpu: ImaginaryGPU) -> Iterator[None]:
    """Replace attention's fused kernels, and count them by the name of the kernel that a GPU would run."""
    stand_ins = dict(kernels.STAND_INS)
    kernels.STAND_INS.update({name: partial(_run, gpu, name) for name in FUSED})
    try:
        yield
    finally:
        kernels.STAND_INS.clear()
        kernels.STAND_INS.update(stand_ins)


def _run(gpu: ImaginaryGPU, name: str, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    def count_run() -> None:
        gpu.kernels[gpu.memory.phase, f"attention by {name}"] += 1

    biases = [x for x in args if isinstance(x, Tensor)]
    out: Tensor = _FusedAttention.apply(q, k, v, count_run, *biases)
    return out
