"""Adafactor (Shazeer & Stern 2018), from torch: no momentum, second moments of matrices kept as rows and columns."""

from typing import Any

from torch.optim import Adafactor

from megatfm.config import AdafactorConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.groups import lr_scales, stacked_names, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters

FLOOR = 1e-15
"""torch clamps second moments at its square, 1e-30, the paper's ε₁; its default is so large that it would show."""


@OPTIMIZERS.register("adafactor")
def adafactor(config: AdafactorConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """One group of whole tensors: the update depends on means over rows, columns and all elements."""

    def make(groups: list[dict[str, Any]]) -> Adafactor:
        return Adafactor(
            groups,
            lr=config.lr,
            beta2_decay=-config.beta2_decay,
            eps=(FLOOR, config.eps2),
            d=config.clip_threshold,
        )

    options = weight_decays(parameters, config.weight_decay)
    names, rates, stacked = list(parameters), lr_scales(parameters), stacked_names(parameters)
    return [OptimizerGroup(names, "whole_tensor", make, options, rates, stacked_names=stacked)]
