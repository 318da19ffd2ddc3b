"""Normalisation layers: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019)."""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import Constant
from megatfm.registry import Registry, did_you_mean

NORMS: Registry[Callable[..., nn.Module]] = Registry("norm")
"""Norms by name, made as `NORMS.get(name)(width, eps, **options)`."""


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Make the norm that the config names. width: None: the residual stream's. Raises UsageError for wrong keys."""
    section, norm = config.norm, NORMS.get(config.norm.name)
    parameters = inspect.signature(norm).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [] if takes_all else [key for key in section.options if key not in parameters]:
        raise UsageError(
            f"model.norm.{unknown[0]}: nothing reads this key of name = {section.name!r}"
            f"{did_you_mean(unknown[0], parameters)}: correct it or leave it out"
        )
    return norm(width or config.d_model, section.eps, **section.options)


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


@NORMS.register("rms_norm")
class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dim (equation 4).

    zero_centered: the parameter is the weight minus 1, as in Gemma: precise near 1, and decayed towards 1.
    """

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
    """RMSNorm over channels that tensor parallelism may shard; `reduce_squares` then sums over shards."""

    tp_plan = (("", "shard_last_dim"), ("reduce_squares", "sum_over_shards"))

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.initial = {"weight": Constant(1.0)}
        self.reduce_squares = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.reduce_squares(precise.square().sum(-1, keepdim=True))
        return (precise * (squares / self.width + self.eps).rsqrt()).to(x.dtype) * self.weight
