"""A matrix without bias."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.initial import Normal


class Linear(nn.Module):
    """y = x Wᵀ with W [d_out, d_in] drawn from N(0, std²)."""

    def __init__(self, d_in: int, d_out: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.initial = {"weight": Normal(std)}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
