"""Matrices and tables of vectors: torch's `Linear` and `Embedding` with initial weights by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.initialisation import Constant, InitDistribution


class Linear(nn.Module):
    """y = x Wᵀ (+ b) with W [d_out, d_in] drawn from `initial`; b starts at 0. heads: that the output is made of.

    matmul: makes y of x, W and b; another one may replace it (`megatfm/models/float8.py`).
    """

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(
        self,
        d_in: int,
        d_out: int,
        initial: InitDistribution,
        *,
        bias: bool = False,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.matmul = heads, F.linear
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.initial = {"weight": initial, **({"bias": Constant(0.0)} if bias else {})}

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a [rows, width] matrix, looked up."""

    def __init__(self, rows: int, width: int, initial: InitDistribution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.initial, self.roles = {"weight": initial}, {"weight": "embedding"}

    def forward(self, indices_BT: Tensor) -> Tensor:
        return F.embedding(indices_BT, self.weight)
