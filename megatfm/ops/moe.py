"""Operations of experts: grouped matrix products, permutations of rows, and weighted sums of rows.

In a grouped product, each group of rows has its own weight matrix; the fastest kernel is chosen.
"""

import importlib
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.torch_private import bag_weight_gradients, is_fake
from megatfm.ops.transfer import read_on_host

# M rows, or entries of bags, N bags, G groups, I input width, O output width, D width, W rows of a window

STRIDE_BYTES = 16
"""torch's grouped_mm needs strides that are multiples of this many bytes."""


class RowWindow(NamedTuple):
    """Rows of a group, from `first` to `end` − 1, and of the window around them that is multiplied."""

    first: int
    end: int
    window_first: int
    window_end: int


def grouped_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Return x Wᵀ [M, O], with group g's W for rows ends[g − 1] to ends[g] − 1.

    ends_G: int32, non-decreasing; groups may be empty. Rows beyond the last end, and their gradients, are undefined.
    """
    if not len(x_MI):  # torch's operator takes no empty x
        return looped_linear(x_MI, weight_GOI, ends_G)
    return KERNELS[choose_grouped_kernel(x_MI, weight_GOI)](x_MI, weight_GOI, ends_G)


def choose_grouped_kernel(x_MI: Tensor, weight_GOI: Tensor) -> str:
    """Return the name of the kernel in KERNELS for these tensors.

    MegaBlocks, if installed, for bfloat16 on GPUs. torch's operator does not support float64 or unaligned widths.
    On CPUs, oneDNN compiles and caches a bfloat16 kernel for each number of rows, at a megabyte each and more time than
    the product takes, so there rows are padded to windows of a few lengths.
    """
    if x_MI.dtype == torch.bfloat16 and not is_fake(x_MI):
        if x_MI.device.type == "cpu":
            return "windows"
        if x_MI.device.type == "cuda" and has_grouped_gemm():
            return "megablocks"
    size = x_MI.element_size()
    aligned = all(width * size % STRIDE_BYTES == 0 for width in weight_GOI.shape[1:])
    return "grouped" if x_MI.dtype in (torch.bfloat16, torch.float32) and aligned else "loop"


def torch_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` by torch's operator."""
    return F.grouped_mm(x_MI, weight_GOI.transpose(-1, -2), offs=ends_G)


def windowed_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` group by group, on windows of rows with one of a few lengths."""
    product: Tensor = _Windowed.apply(x_MI, weight_GOI, ends_G)
    return product


def looped_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` group by group; the reference. Weights of empty groups get a zero gradient."""
    sizes = ends_G.diff(prepend=ends_G.new_zeros(1)).tolist()
    *groups_xI, beyond_xI = x_MI.split([*sizes, len(x_MI) - sum(sizes)])
    products = [F.linear(rows_xI, weight_OI) for rows_xI, weight_OI in zip(groups_xI, weight_GOI, strict=True)]
    return torch.cat([*products, beyond_xI.new_zeros(len(beyond_xI), weight_GOI.shape[1])])


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI)
        ctx.windows = make_windows(ends_G.tolist())
        return _multiply_windows(x_MI, weight_GOI.mT, ctx.windows)

    @staticmethod
    def backward(ctx, gradient_MO):  # type: ignore[no-untyped-def]
        x_MI, weight_GOI = ctx.saved_tensors
        gradient_MO, x_grad_MI, weight_grad_GOI = gradient_MO.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            x_grad_MI = _multiply_windows(gradient_MO, weight_GOI, ctx.windows)
        if ctx.needs_input_grad[1]:
            weight_grad_GOI = _compute_weight_gradients(gradient_MO, x_MI, weight_GOI, ctx.windows)
        return x_grad_MI, weight_grad_GOI, None


def _compute_weight_gradients(
    gradient_MO: Tensor, x_MI: Tensor, weight_GOI: Tensor, windows: list[RowWindow]
) -> Tensor:
    """Return the weight gradients [G, O, I]."""
    weight_grad_GOI = torch.zeros_like(weight_GOI)
    for (first, end, window_first, window_end), weight_grad_OI in zip(windows, weight_grad_GOI, strict=True):
        if first < end:
            window_grad_WO = gradient_MO.new_zeros(window_end - window_first, gradient_MO.shape[1])
            window_grad_WO[first - window_first : end - window_first] = gradient_MO[first:end]
            torch.mm(window_grad_WO.T, x_MI[window_first:window_end], out=weight_grad_OI)
    return weight_grad_GOI


def _multiply_windows(x_MI: Tensor, weight_GIO: Tensor, windows: list[RowWindow]) -> Tensor:
    """Return x W [M, O]. Rows that a window has beyond its group are overwritten by the next group's."""
    y_MO = x_MI.new_empty(len(x_MI), weight_GIO.shape[2])
    for (first, end, window_first, window_end), weight_IO in zip(windows, weight_GIO, strict=True):
        window = slice(window_first, window_end)
        if window_first == first < end:
            torch.mm(x_MI[window], weight_IO, out=y_MO[window])
        elif first < end:
            y_MO[first:end] = torch.mm(x_MI[window], weight_IO)[first - window_first : end - window_first]
    return y_MO


def make_windows(ends: list[int]) -> list[RowWindow]:
    """Return each group's rows and a window around them, at most an eighth (or 8 rows) longer, within all rows."""
    windows, first = [], 0
    for end in ends:
        size = end - first
        step = max(8, 1 << max(size - 1, 0).bit_length() >> 4)
        length = min(-(-size // step) * step, ends[-1])
        window_first = min(first, ends[-1] - length)
        windows.append(RowWindow(first, end, window_first, window_first + length))
        first = end
    return windows


@cache
def has_grouped_gemm() -> bool:
    """Return whether MegaBlocks' operator is installed (`make moe`)."""
    return find_spec("grouped_gemm") is not None


def megablocks_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` by MegaBlocks' operator (Gale et al. 2023); 0 beyond the last end.

    Not run on a GPU yet: a stand-in on the CPU holds its contract. The operator wants bfloat16, contiguous, and the
    groups' sizes as int64 on the host, which has to wait for them: once for all products of these groups.
    """
    host_ends_G = read_on_host(ends_G)
    sizes_G = host_ends_G.diff(prepend=host_ends_G.new_zeros(1)).long()
    rows = int(sizes_G.sum())
    if not rows:  # the operator rejects empty x
        return (x_MI.sum() * weight_GOI.sum() * 0).expand(len(x_MI), weight_GOI.shape[1])
    product_RO: Tensor = _MegaBlocks.apply(x_MI[:rows].contiguous(), weight_GOI.contiguous(), sizes_G)
    return F.pad(product_RO, (0, 0, 0, len(x_MI) - rows))


@torch.library.custom_op("megatfm::grouped_gemm", mutates_args=())
def megablocks_gemm(a: Tensor, b: Tensor, sizes: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """MegaBlocks' operator as one of torch's, whose results selective recomputation can save.

    a: [R, I], b: [G, I, O], or [G, O, I] with `transpose_b`: returns [R, O]. With `transpose_a`, b: [R, O]: returns
    [G, I, O]. sizes: rows of each group, int64 [G] on the host.
    """
    product: Tensor = importlib.import_module("grouped_gemm.backend").gmm(a, b, sizes, transpose_a, transpose_b)
    return product


class _MegaBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI, weight_GOI, sizes_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_RI, weight_GOI, sizes_G)
        return megablocks_gemm(x_RI, weight_GOI, sizes_G, False, True)

    @staticmethod
    def backward(ctx, gradient_RO):  # type: ignore[no-untyped-def]
        x_RI, weight_GOI, sizes_G = ctx.saved_tensors
        gradient_RO, x_grad_RI, weight_grad_GOI = gradient_RO.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            x_grad_RI = megablocks_gemm(gradient_RO, weight_GOI, sizes_G, False, False)
        if ctx.needs_input_grad[1]:
            weight_grad_GOI = megablocks_gemm(gradient_RO, x_RI, sizes_G, True, False)
        return x_grad_RI, weight_grad_GOI, None


KERNELS = {
    "grouped": torch_linear,
    "windows": windowed_linear,
    "megablocks": megablocks_linear,
    "loop": looped_linear,
}


def permute_rows(rows_MI: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
    """Return rows[order]. inverse: the inverse permutation, by which the backward pass gathers, too.

    torch's own adjoint of an indexed read zeroes a tensor and adds each row to it.
    """
    permuted: Tensor = _PermuteRows.apply(rows_MI, order_M, inverse_M)
    return permuted


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_MI, order_M, inverse_M):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse_M)
        return rows_MI.index_select(0, order_M)

    @staticmethod
    def backward(ctx, gradient_MI):  # type: ignore[no-untyped-def]
        (inverse_M,) = ctx.saved_tensors
        return gradient_MI.index_select(0, inverse_M), None, None


class RowBags(NamedTuple):
    """N bags of rows. Entry i of all M is row `rows[i]`; bag n has the entries from `starts[n]` to the next bag's.

    Sums of bags and their adjoints are one kernel a pass: a gather, a product and a sum would write and read the rows
    again between them. torch's `embedding_bag` accumulates in float32 at least and in the order of the indices, so that
    results do not depend on timing.

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
