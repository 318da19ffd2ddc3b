"""Sums of squares that are exact to float32's precision at any size, without a copy of what is summed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatfm.ops.torch_private import foreach_norm

PIECE = 2**14
"""On a CPU torch adds a norm up in a few running sums of float32: of 38 M elements it is 0.3 % short, of a piece 2e-7,
or 2e-6 where they are converted from bfloat16 (on a GPU its kernels cut tensors up themselves)."""


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² over all elements of all tensors, in float64, on their device; they have one device and one dtype.

    Where there are none, or none with elements, as on a rank of which all shards are empty, it is 0. Squares are added
    up in float32 within a piece, in float64 if the tensors are, and in float64 over pieces.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].device.type != "cpu":
        return torch.stack(foreach_norm(list(tensors), 2, dtype)).double().square().sum()
    norms, remainders = [], []
    for tensor in tensors:
        flat, n_full = tensor.reshape(-1), tensor.numel() // PIECE * PIECE
        if n_full:
            norms.append(torch.linalg.vector_norm(flat[:n_full].view(-1, PIECE), dim=1, dtype=dtype))
        if n_full < len(flat):
            remainders.append(flat[n_full:])
    if remainders:
        norms.append(torch.stack(foreach_norm(remainders, 2, dtype)))
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).double().square().sum()
