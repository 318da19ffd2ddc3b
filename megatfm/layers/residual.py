"""Norm placements: how a sublayer S is added to the residual stream x, `add(x, S(input_norm(x)))`."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.dropout import Dropout, DropPath
from megatfm.layers.initialisation import Constant, StackKind, compute_deepnorm_constants
from megatfm.layers.norm import make_norm
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry


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
