"""Weighted sums of rows that are read by index, and their adjoints: one kernel a pass.

A gather, a product and a sum would write and read the rows again between them. torch's `embedding_bag` accumulates in
float32 at least and in the order of the indices, so that results do not depend on timing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.torch_private import bag_weight_gradients

# M entries of bags, N bags, D width


class RowBags(NamedTuple):
    """N bags of rows. Entry i of all M is row `rows[i]`; bag n has the entries from `starts[n]` to the next bag's.

    rows: int64 [M]; entries of weight 0 may name any row. starts: int64 [N]. order: int64 [M], the entry of each row.
    bags: int64 [M], the bag of each row.
    """

    rows: Tensor
    starts: Tensor
    order: Tensor
    bags: Tensor


def sum_bags(rows_MD: Tensor, bags: RowBags, weights_M: Tensor) -> Tensor:
    """Return Σ weight · row over the entries of each bag, [N, D]. weights: by entry."""
    dtype = torch.promote_types(rows_MD.dtype, weights_M.dtype)
    sums_ND: Tensor = _SumBags.apply(rows_MD.to(dtype), weights_M.to(dtype), *bags)
    return sums_ND


def spread_rows(x_ND: Tensor, bags: RowBags, weights_M: Tensor | None) -> Tensor:
    """Return the vector of each row's bag, [M, D].

    weights: of the rows' gradients, by entry; None: 1.
    """
    rows_MD: Tensor = _SpreadRows.apply(x_ND, weights_M, *bags)
    return rows_MD


def _sum(rows_MD: Tensor, indices_M: Tensor, starts_N: Tensor, weights_M: Tensor | None) -> Tensor:
    return F.embedding_bag(indices_M, rows_MD, starts_N, mode="sum", per_sample_weights=weights_M)


class _SumBags(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_MD, weights_M, *bags):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows_MD, weights_M, *bags)
        entries_M, starts_N, _, _ = bags
        return _sum(rows_MD, entries_M, starts_N, weights_M)

    @staticmethod
    def backward(ctx, gradient_ND):  # type: ignore[no-untyped-def]
        rows_MD, weights_M, entries_M, starts_N, order_M, bags_M = ctx.saved_tensors
        gradient_ND, rows_grad_MD, weights_grad_M = gradient_ND.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            starts_M = torch.arange(len(order_M), device=order_M.device)  # a bag for each row
            rows_grad_MD = _sum(gradient_ND, bags_M, starts_M, weights_M.index_select(0, order_M))
        if ctx.needs_input_grad[1]:
            bag_of_entry_M = torch.empty_like(bags_M).scatter_(0, order_M, bags_M)
            weights_grad_M = bag_weight_gradients(gradient_ND, rows_MD, entries_M, starts_N, bag_of_entry_M, 0)
        return rows_grad_MD, weights_grad_M, *[None] * 4


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weights_M, *bags):  # type: ignore[no-untyped-def]
        entries_M, starts_N, _, bags_M = bags
        ctx.save_for_backward(weights_M, entries_M, starts_N)
        return x_ND.index_select(0, bags_M)

    @staticmethod
    def backward(ctx, gradient_MD):  # type: ignore[no-untyped-def]
        weights_M, entries_M, starts_N = ctx.saved_tensors
        return _sum(gradient_MD.contiguous(), entries_M, starts_N, weights_M), *[None] * 5
