"""A matrix, with or without bias."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.initial import Constant, InitDistribution


class Linear(nn.Module):
    """y = x Wᵀ (+ b) with W [d_out, d_in] drawn from `initial`; b starts at 0. heads: that the output is made of.

    matmul: makes y of x, W and b; another one may be put in its place (`megatfm/models/fp8.py`).
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
