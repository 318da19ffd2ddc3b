"""A matrix, with or without bias."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.initial import Constant, Initial


class Linear(nn.Module):
    """y = x Wᵀ (+ b) with W [d_out, d_in] drawn from `initial`; b starts at 0. heads: that the output is made of."""

    def __init__(
        self, d_in: int, d_out: int, initial: Initial, *, bias: bool = False, heads: int | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.initial = {"weight": initial, **({"bias": Constant(0.0)} if bias else {})}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
