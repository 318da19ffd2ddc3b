"""Stand-ins by shapes for what a GPU computes with kernels of its own: attention, the loss over a vocabulary, experts.

Each keeps what the real part keeps, allocates what it allocates, and notes the kernels that a GPU would run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatfm.ops.cross_entropy import LOGITS_BYTES, ROW_ALIGNMENT, padded
from megatfm.ops.grouped_mm import KERNELS

Note = Callable[..., None]
"""Called with (name, kind, flops, inputs, outputs, dims=None) for each kernel."""


class AttentionStandIn(torch.autograd.Function):
    """Attention as a fused kernel: keeps q, k, v, the output and a float32 a query."""

    @staticmethod
    def forward(ctx, note, q_BNTH, k_BKSH, v_BKSH, bias):  # type: ignore[no-untyped-def]
        output = q_BNTH.new_empty(q_BNTH.shape[0], q_BNTH.shape[2], q_BNTH.shape[1], v_BKSH.shape[-1])
        output = output.transpose(1, 2)  # kernels lay heads of a token side by side
        sums_BNT = q_BNTH.new_empty(q_BNTH.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, output, sums_BNT)
        ctx.note, ctx.bias = note, bias
        note(False, (q_BNTH, k_BKSH, v_BKSH), (output, sums_BNT))
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        gradients = tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
        ctx.note(True, (*ctx.saved_tensors, gradient), gradients)
        into_bias = torch.empty_like(ctx.bias) if ctx.needs_input_grad[4] else None
        return None, *gradients, into_bias


PASSES_OVER_PARTS = 4
"""Times that the loss of a part of a vocabulary goes over the logits: maximum, exponentials, their sum, gradient."""


class CrossEntropyStandIn(torch.autograd.Function):
    """`ops.cross_entropy` as a GPU runs it: chunks of a gigabyte of logits, which one kernel makes their gradient."""

    @staticmethod
    def forward(ctx, note, is_cut, hidden_MD, weight_WD, bias_W):  # type: ignore[no-untyped-def]
        rows, width = len(weight_WD), padded(len(weight_WD))
        chunk = max(
            LOGITS_BYTES // (width * hidden_MD.element_size()) // ROW_ALIGNMENT * ROW_ALIGNMENT, ROW_ALIGNMENT
        )
        buffer = hidden_MD.new_empty(min(chunk, len(hidden_MD)), width)
        into_hidden, into_weight = torch.empty_like(hidden_MD), None
        for start in range(0, len(hidden_MD), chunk):
            hidden = hidden_MD[start : start + chunk]
            logits = buffer[: len(hidden), :rows]
            torch.mm(hidden, weight_WD.T, out=logits)
            if is_cut:  # parts of a vocabulary are joined between passes over a copy in float32
                values = logits.float()
                for _ in range(PASSES_OVER_PARTS):
                    note("cross_entropy", "pointwise", 0, (values,), (values,))
                logits.copy_(values)
                del values
            else:
                note("cross_entropy", "pointwise", 0, (logits,), (logits,))
            into_hidden[start : start + chunk] = logits @ weight_WD
            product = logits.T @ hidden
            into_weight = product if into_weight is None else into_weight.float().add_(product)
        assert into_weight is not None
        ctx.save_for_backward(into_hidden, into_weight.to(weight_WD.dtype))
        ctx.bias = bias_W
        return hidden_MD.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        into_hidden, into_weight = (saved.mul_(gradient.to(saved.dtype)) for saved in ctx.saved_tensors)
        into_bias = None if ctx.bias is None else torch.empty_like(ctx.bias)
        return None, None, into_hidden, into_weight, into_bias


class ExpertsStandIn(torch.autograd.Function):
    """Products of experts with the rows that they get on average."""

    @staticmethod
    def forward(ctx, note, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI, ends_G)
        ctx.note = note
        output_MO = x_MI.new_empty(len(x_MI), weight_GOI.shape[1])
        _note_groups(note, x_MI, weight_GOI, output_MO, weight_GOI)
        return output_MO

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x_MI, weight_GOI, _ = ctx.saved_tensors
        into_x, into_weight = torch.empty_like(x_MI), torch.empty_like(weight_GOI)
        _note_groups(ctx.note, gradient, weight_GOI, into_x, weight_GOI)
        _note_groups(ctx.note, gradient, x_MI, into_weight, weight_GOI)
        return None, into_x, into_weight, None


def _note_groups(note: Note, left: Tensor, right: Tensor, output: Tensor, weight_GOI: Tensor) -> None:
    """Note a grouped product. Of all rows [M, I] the experts here get their share alone (`note` knows it)."""
    groups, outer, inner = weight_GOI.shape
    note(
        "_grouped_mm",
        "matmul",
        0.0,
        (left, right),
        (output,),
        (groups, -(-len(left) // groups), outer, inner),
    )


@contextmanager
def experts_by_shapes(note: Note) -> Iterator[None]:
    """Have products of experts recorded: which rows they get is a matter of values, how many is not."""

    def product(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
        output_MO: Tensor = ExpertsStandIn.apply(note, x_MI, weight_GOI, ends_G)
        return output_MO

    before: dict[str, Any] = dict(KERNELS)
    KERNELS.update(dict.fromkeys(KERNELS, product))
    try:
        yield
    finally:
        KERNELS.update(before)
