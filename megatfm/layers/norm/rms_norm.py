"""RMSNorm (Zhang & Sennrich 2019, equation 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.norm.registry import NORMS
from megatfm.ops.initial import Constant


@NORMS.register("rms_norm")
class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dim. zero_centered: the weight is stored less 1, so that what is
    near 1
    keeps its precision, and weight decay pulls to 1 (Gemma)."""

    def __init__(self, d_model: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.empty(d_model))
        self.initial = {"weight": Constant(0.0 if zero_centered else 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        precise = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(precise), self.weight.shape, 1 + self.weight.to(precise), self.eps).to(x.dtype)


class ShardedRMSNorm(nn.Module):
    """The same over channels that ranks may have a part of each (`total` sums over the parts)."""

    tp_plan = (("", "last dim"), ("total", "summed over parts"))

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.initial = {"weight": Constant(1.0)}
        self.total = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.total(precise.square().sum(-1, keepdim=True))
        return (precise * (squares / self.width + self.eps).rsqrt()).to(x.dtype) * self.weight
