"""Lion (Chen et al. 2023, algorithm 2): the sign of a momentum. A file of our own: libraries for it load in seconds."""

from typing import Any

import torch

from megatfm.config import LionConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.groups import lr_scales, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters


@OPTIMIZERS.register("lion")
def lion(config: LionConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """One group, decay by role."""

    def make(groups: list[dict[str, Any]]) -> Lion:
        return Lion(groups, lr=config.lr, betas=config.betas)

    options = weight_decays(parameters, config.weight_decay)
    return [OptimizerGroup(list(parameters), "elementwise", make, options, lr_scales(parameters))]


class Lion(torch.optim.Optimizer):
    """w ← w − lr·(sign(β₁m + (1−β₁)g) + λw), then m ← β₂m + (1−β₂)g."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            momenta = [self.state[weight]["exp_avg"] for weight in weights]
            updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
