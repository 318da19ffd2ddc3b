"""Normalisation layers, and norm placements: how a sublayer S is added to the residual stream x.

LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019). A block computes `add(x, S(input_norm(x)))`.
"""

import inspect
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout, DropPath
from megatfm.layers.initialisation import Constant, StackKind, compute_deepnorm_constants
from megatfm.layers.sequence import SequenceMetadata
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


class Residual(Protocol):
    """Interface of a norm placement: the norms around one sublayer."""

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        """Return the sublayer's input."""

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return the residual stream after adding the sublayer's output y."""


RESIDUALS: Registry[Callable[[ModelConfig, str, StackKind], Residual]] = Registry("norm placement")
"""Norm placements by name, made as `RESIDUALS.get(name)(config, site, stack)`. site: name of the dropout site."""


class LayerScale(nn.Module):
    """A learned factor for each channel (CaiT; Touvron et al. 2021, section 2.1)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.initial = {"weight": Constant(start)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.weight


class ResidualDropout(nn.Module):
    """Dropout, layer scale and stochastic depth on a sublayer's output, before it is added."""

    tp_plan = (("dropout", "local_token_dropout"), ("layer_scale", "sequence_parallel"))

    def __init__(self, config: ModelConfig, site: str) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout, site)
        self.layer_scale = LayerScale(config.d_model, config.layer_scale) if config.layer_scale else None
        self.drop_path = DropPath(site)

    def forward(self, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        y_BTD = self.dropout(y_BTD, sequence)
        if self.layer_scale is not None:
            y_BTD = self.layer_scale(y_BTD)
        return self.drop_path(y_BTD, sequence)


@RESIDUALS.register("none")
class NoNorm(nn.Module):
    """x + S(x), without a norm; base of the other placements."""

    def __init__(self, config: ModelConfig, site: str, stack: StackKind) -> None:
        super().__init__()
        self.branch = ResidualDropout(config, site)

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(y_BTD, sequence)


@RESIDUALS.register("pre")
class PreNorm(NoNorm):
    """x + S(N(x)) (Xiong et al. 2020)."""

    tp_plan: tuple[tuple[str, str], ...] = (("norm", "sequence_parallel"),)

    def __init__(self, config: ModelConfig, site: str, stack: StackKind) -> None:
        super().__init__(config, site, stack)
        self.norm = make_norm(config)

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return self.norm(x_BTD)


@RESIDUALS.register("post")
class PostNorm(NoNorm):
    """N(x + S(x)) (Vaswani et al. 2017)."""

    tp_plan = (("norm", "sequence_parallel"),)

    def __init__(self, config: ModelConfig, site: str, stack: StackKind) -> None:
        super().__init__(config, site, stack)
        self.norm = make_norm(config)

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return self.norm(x_BTD + self.branch(y_BTD, sequence))


@RESIDUALS.register("res_post")
class ResidualPostNorm(PreNorm):
    """x + N(S(x)) (Swin-V2: Liu et al. 2022, section 3.2)."""

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(self.norm(y_BTD), sequence)


@RESIDUALS.register("sandwich")
class SandwichNorm(PreNorm):
    """x + N(S(N(x))) (Ding et al. 2021, section 2.2)."""

    tp_plan = (("norm", "sequence_parallel"), ("norm_out", "sequence_parallel"))

    def __init__(self, config: ModelConfig, site: str, stack: StackKind) -> None:
        super().__init__(config, site, stack)
        self.norm_out = make_norm(config)

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(self.norm_out(y_BTD), sequence)


@RESIDUALS.register("deepnorm")
class DeepNorm(PostNorm):
    """N(α x + S(x)) (Wang et al. 2022): α grows with the depth; use with `init.name = "deepnorm"`."""

    def __init__(self, config: ModelConfig, site: str, stack: StackKind) -> None:
        super().__init__(config, site, stack)
        self.alpha = compute_deepnorm_constants(config, stack)[0]

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return self.norm(self.alpha * x_BTD + self.branch(y_BTD, sequence))
