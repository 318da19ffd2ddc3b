"""Matrix products of groups of rows, each with a matrix of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor

# M rows, G groups, I width of the rows, O of the products

ALIGNED = 16
"""Bytes of which torch's grouped product wants all strides to be multiples."""


def grouped_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """x Wᵀ [M, O], with the group's W for rows from the end of the group before up to its own.

    ends: int32, not falling; a group may be empty. Rows beyond the last end are undefined, and so are their gradients.
    """
    if not len(x_MI):  # torch's operator takes no empty x
        return looped_linear(x_MI, weight_GOI, ends_G)
    if has_grouped_product(x_MI, weight_GOI):
        product: Tensor = F.grouped_mm(x_MI, weight_GOI.transpose(-1, -2), offs=ends_G)
        return product
    return looped_linear(x_MI, weight_GOI, ends_G)


def has_grouped_product(x_MI: Tensor, weight_GOI: Tensor) -> bool:
    """Whether torch's operator takes these: no float64, and no odd widths."""
    size = x_MI.element_size()
    aligned = all(width * size % ALIGNED == 0 for width in weight_GOI.shape[1:])
    return x_MI.dtype in (torch.bfloat16, torch.float32) and aligned


def looped_linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """The same, one product after the other: the reference. An empty product gives an empty group's W its gradient."""
    ends = ends_G.tolist()
    bounds = zip([0, *ends], ends, strict=False)
    products = [F.linear(x_MI[i:j], weight_OI) for (i, j), weight_OI in zip(bounds, weight_GOI, strict=True)]
    return torch.cat([*products, x_MI.new_zeros(len(x_MI) - ends[-1], weight_GOI.shape[1])])
