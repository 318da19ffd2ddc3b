"""Sums of squares, accurate to float32 at any size, without a copy of the tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatfm.ops.torch_private import foreach_norm

CHUNK_ELEMENTS = 2**14
"""Elements of a partial norm on a CPU. torch's norm accumulates in a few float32 sums: 0.3 % too small for 38 M
elements, but within 2e-7 for this many (2e-6 from bfloat16). GPU kernels reduce hierarchically by themselves."""


@torch.no_grad()
def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ x² over all elements of tensors of one device and dtype, a float64 scalar on that device.

    Accumulates in float32 within chunks (float64 for float64 tensors), and in float64 over chunks. Returns 0 without
    elements, as on a rank whose shards are all empty.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].device.type != "cpu":
        return torch.stack(foreach_norm(list(tensors), 2, dtype)).double().square().sum()
    norms, remainders = [], []
    for tensor in tensors:
        flat, n_full = tensor.reshape(-1), tensor.numel() // CHUNK_ELEMENTS * CHUNK_ELEMENTS
        if n_full:
            norms.append(torch.linalg.vector_norm(flat[:n_full].view(-1, CHUNK_ELEMENTS), dim=1, dtype=dtype))
        if n_full < len(flat):
            remainders.append(flat[n_full:])
    if remainders:
        norms.append(torch.stack(foreach_norm(remainders, 2, dtype)))
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).double().square().sum()
