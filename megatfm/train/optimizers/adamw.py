"""AdamW (Loshchilov & Hutter 2019), from torch."""

from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from megatfm.config import AdamWConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.groups import lr_scales, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters
from megatfm.train.optimizers.short_moments import BF16StateAdamW


@OPTIMIZERS.register("adamw")
def adamw(config: AdamWConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """One group, decay by role."""
    options, rates = weight_decays(parameters, config.weight_decay), lr_scales(parameters)
    if config.moments_dtype == "bf16":
        bf16_state_adam_w = partial(BF16StateAdamW, lr=config.lr, betas=config.betas, eps=config.eps)
        return [
            OptimizerGroup(
                list(parameters),
                "elementwise",
                bf16_state_adam_w,
                options,
                rates,
                ("step",),
                state_dtype=torch.bfloat16,
            )
        ]

    def make(groups: list[dict[str, Any]]) -> AdamW:
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    return [OptimizerGroup(list(parameters), "elementwise", make, options, rates)]
