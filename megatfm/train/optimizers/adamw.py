"""AdamW (Loshchilov & Hutter 2019), from torch."""

from typing import Any

from torch.optim import AdamW

from megatfm.config import AdamWConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.groups import lr_scales, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters


@OPTIMIZERS.register("adamw")
def adamw(config: AdamWConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """One group, decay by role."""

    def make(groups: list[dict[str, Any]]) -> AdamW:
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    options = weight_decays(parameters, config.weight_decay)
    return [OptimizerGroup(list(parameters), "elementwise", make, options, lr_scales(parameters))]
