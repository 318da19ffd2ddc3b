"""Matrix products of groups of rows, each group with its own matrix, by the fastest kernel of a device."""

import importlib
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.torch_private import is_fake
from megatfm.ops.transfer import remember_host_copy, to_host

# M rows, G groups, I width of the rows, O of the products


RowRange = tuple[int, int, int, int]
"""A group's first row and its end, and those of rows around it."""
ALIGNED = 16
"""Bytes of which torch's grouped product wants all strides to be multiples."""


def grouped_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """x Wᵀ [M, O], with the group's W for rows from the end of the group before up to its own.

    ends: int32, not falling; a group may be empty. Rows beyond the last end are undefined, and so are their gradients.
    """
    if not len(x_MI):  # torch's operator takes no empty x
        return looped_linear(x_MI, weight_GOI, ends_G)
    return KERNELS[kernel_for(x_MI, weight_GOI)](x_MI, weight_GOI, ends_G)


def kernel_for(x_MI: Tensor, weight_GOI: Tensor) -> str:
    """Name the kernel of KERNELS for these tensors on their device.

    MegaBlocks, where it is installed, takes bfloat16 on GPUs. torch's operator takes no float64 and no odd widths.
    oneDNN, which multiplies bfloat16 on CPUs, builds and keeps a kernel for each number of rows, which takes longer
    than the product, and a megabyte: there rows go by windows of few lengths.
    """
    if x_MI.dtype == torch.bfloat16 and not is_fake(x_MI):
        if x_MI.device.type == "cpu":
            return "windows"
        if x_MI.device.type == "cuda" and has_grouped_gemm():
            return "megablocks"
    size = x_MI.element_size()
    aligned = all(width * size % ALIGNED == 0 for width in weight_GOI.shape[1:])
    return "grouped" if x_MI.dtype in (torch.bfloat16, torch.float32) and aligned else "loop"


def torch_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` by torch's operator."""
    return F.grouped_mm(x_MI, weight_GOI.transpose(-1, -2), offs=ends_G)


def bucketed_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` group by group, each on a window of rows around it whose length is one of a few."""
    product: Tensor = _Windowed.apply(x_MI, weight_GOI, ends_G)
    return product


def looped_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` group by group: the reference. The weight of an empty group gets a zero gradient."""
    sizes = ends_G.diff(prepend=ends_G.new_zeros(1)).tolist()
    *groups, rest_xI = x_MI.split([*sizes, len(x_MI) - sum(sizes)])
    products = [F.linear(rows_xI, weight_OI) for rows_xI, weight_OI in zip(groups, weight_GOI, strict=True)]
    return torch.cat([*products, rest_xI.new_zeros(len(rest_xI), weight_GOI.shape[1])])


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI)
        ctx.windows = padded_ranges(ends_G.tolist())
        return _by_windows(x_MI, weight_GOI.mT, ctx.windows)

    @staticmethod
    def backward(ctx, gradient_MO):  # type: ignore[no-untyped-def]
        x_MI, weight_GOI = ctx.saved_tensors
        gradient_MO, into_x_MI, into_weight_GOI = gradient_MO.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            into_x_MI = _by_windows(gradient_MO, weight_GOI, ctx.windows)
        if ctx.needs_input_grad[1]:
            into_weight_GOI = _into_weights(gradient_MO, x_MI, weight_GOI, ctx.windows)
        return into_x_MI, into_weight_GOI, None


def _into_weights(gradient_MO: Tensor, x_MI: Tensor, weight_GOI: Tensor, spans: list[RowRange]) -> Tensor:
    """Gradients [G, O, I]."""
    into_weight_GOI = torch.zeros_like(weight_GOI)
    for (first, last, low, high), into_OI in zip(spans, into_weight_GOI, strict=True):
        if first < last:
            own_WO = gradient_MO.new_zeros(high - low, gradient_MO.shape[1])
            own_WO[first - low : last - low] = gradient_MO[first:last]
            torch.mm(own_WO.T, x_MI[low:high], out=into_OI)
    return into_weight_GOI


def _by_windows(x_MI: Tensor, weight_GIO: Tensor, spans: list[RowRange]) -> Tensor:
    """x W [M, O]. What a window has beyond its group's end is overwritten by the next group."""
    y_MO = x_MI.new_empty(len(x_MI), weight_GIO.shape[2])
    for (first, last, low, high), weight_IO in zip(spans, weight_GIO, strict=True):
        if low == first < last:
            torch.mm(x_MI[low:high], weight_IO, out=y_MO[low:high])
        elif first < last:
            y_MO[first:last] = torch.mm(x_MI[low:high], weight_IO)[first - low : last - low]
    return y_MO


def padded_ranges(ends: list[int]) -> list[RowRange]:
    """Ranges of each group: its first row and its end, and those of a window around it, an eighth longer at most (or
    8 rows), within the rows of all groups."""
    ranges, first = [], 0
    for last in ends:
        size = last - first
        step = max(8, 1 << max(size - 1, 0).bit_length() >> 4)
        length = min(-(-size // step) * step, ends[-1])
        low = min(first, ends[-1] - length)
        ranges.append((first, last, low, low + length))
        first = last
    return ranges


@cache
def has_grouped_gemm() -> bool:
    """Whether MegaBlocks' operator is installed (`make moe`)."""
    return find_spec("grouped_gemm") is not None


def megablocks_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Compute `grouped_linear` by MegaBlocks' operator (Gale et al. 2023); 0 beyond the last end.

    Not run on a GPU yet: a stand-in on the CPU holds its contract. The operator wants bfloat16, contiguous, and the
    groups' sizes as int64 on the host, which has to wait for them: once for all products of these groups.
    """
    host_ends_G = to_host(ends_G)
    if host_ends_G is not ends_G:
        remember_host_copy(ends_G, host_ends_G)
    sizes_G = host_ends_G.diff(prepend=host_ends_G.new_zeros(1)).long()
    rows = int(sizes_G.sum())
    if not rows:  # it takes no empty x
        return (x_MI.sum() * weight_GOI.sum() * 0).expand(len(x_MI), weight_GOI.shape[1])
    gmm = importlib.import_module("grouped_gemm.ops").gmm
    product_RO: Tensor = gmm(x_MI[:rows].contiguous(), weight_GOI.contiguous(), sizes_G, trans_b=True)
    return F.pad(product_RO, (0, 0, 0, len(x_MI) - rows))


KERNELS = {
    "grouped": torch_linear,
    "windows": bucketed_linear,
    "megablocks": megablocks_linear,
    "loop": looped_linear,
}
