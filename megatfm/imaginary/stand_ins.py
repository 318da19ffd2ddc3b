"""Stand-ins for attention's kernels on the imaginary GPU, which allocate and save as much, and count their runs.

They are operators of their own, so that compiled blocks call them, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatfm.imaginary.device import STAND_IN_NAMESPACE
from megatfm.ops.attention import kernels

FUSED = ("fused", "varlen", "flex")
"""Kernels without a tensor of scores."""


@torch.library.custom_op(f"{STAND_IN_NAMESPACE}::attention", mutates_args=())
def attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, biases: Sequence[Tensor], kernel: str
) -> tuple[Tensor, Tensor]:
    """Stand-in for a fused kernel: return its output, whose heads of a token are neighbours, and for each query its
    log-sum-exp in float32."""
    rows, heads, length, _ = q_BNTH.shape
    out_BNTV = q_BNTH.new_empty(rows, length, heads, v_BKSV.shape[-1]).transpose(1, 2)
    return out_BNTV, q_BNTH.new_empty(rows, heads, length, dtype=torch.float32)


@torch.library.custom_op(f"{STAND_IN_NAMESPACE}::attention_backward", mutates_args=())
def attention_backward(
    gradient_BNTV: Tensor,
    inputs: Sequence[Tensor],
    out_BNTV: Tensor,
    lse_BNT: Tensor,
    needed: Sequence[bool],
    kernel: str,
) -> list[Tensor]:
    """Stand-in for its backward pass, which reads all of its arguments: return the gradients of needed inputs."""
    return [torch.empty_like(x) for x, is_needed in zip(inputs, needed, strict=True) if is_needed]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, biases, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *biases, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[3]]
    computed = iter(attention_backward(gradient, inputs, out, lse, needed, ctx.kernel))
    q, k, v, *biases = [next(computed) if is_needed else None for is_needed in needed]
    return q, k, v, biases, None


attention.register_fake(attention._init_fn)
attention_backward.register_fake(attention_backward._init_fn)
attention.register_autograd(_backward, setup_context=_save_for_backward)


@contextmanager
def replace_fused_attention() -> Iterator[None]:
    """Replace attention's fused kernels. Each run counts by the name of the kernel that a GPU would run."""
    stand_ins = dict(kernels.STAND_INS)
    kernels.STAND_INS.update({name: partial(_run, name) for name in FUSED})
    try:
        yield
    finally:
        kernels.STAND_INS.clear()
        kernels.STAND_INS.update(stand_ins)


def _run(name: str, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    biases = [x for x in args if isinstance(x, Tensor)]
    out, _ = attention(q, k, v, biases, name)
    return out
