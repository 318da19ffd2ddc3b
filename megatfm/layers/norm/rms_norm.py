"""RMSNorm (Zhang & Sennrich 2019, equation 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.norm.registry import NORMS
from megatfm.ops.initial import Constant


@NORMS.register("rms_norm")
class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dim."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))
        self.initial = {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
