"""Layer normalisation (Ba et al. 2016)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.norm.registry import NORMS
from megatfm.ops.initial import Constant


@NORMS.register("layer_norm")
class LayerNorm(nn.Module):
    """(x − mean) / √(variance + eps) · weight + bias over the last dim."""

    def __init__(self, d_model: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))
        self.bias = nn.Parameter(torch.empty(d_model)) if bias else None
        self.initial = {"weight": Constant(1.0), **({"bias": Constant(0.0)} if bias else {})}

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
