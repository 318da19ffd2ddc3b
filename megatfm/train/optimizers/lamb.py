"""LAMB (You et al. 2020, algorithm 2). A file of our own: the libraries' differ from the paper in decay and clamps."""

from typing import Any

import torch
from torch import Tensor

from megatfm.config import LambConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.groups import lr_scales, stacked_names, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters


@OPTIMIZERS.register("lamb")
def lamb(config: LambConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """One group of whole tensors; those that don't decay aren't scaled either, as in the paper's BERT."""

    def make(groups: list[dict[str, Any]]) -> Lamb:
        return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    decays = weight_decays(parameters, config.weight_decay)
    options = {name: {**decays[name], "scaled": p.decays} for name, p in parameters.items()}
    names, rates, stacked = list(parameters), lr_scales(parameters), stacked_names(parameters)
    return [
        OptimizerGroup(names, "whole_tensor", make, options, rates, counters=("step",), stacked_names=stacked)
    ]


class Lamb(torch.optim.Optimizer):
    """w ← w − lr·‖w‖/‖u‖·u with u = m̂/(√v̂ + ε) + λw of Adam's m̂ and v̂; the ratio is 1 where a norm is 0."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "scaled": True, "step": 0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for weight in group["params"]:
                update = self._update(weight, group)
                if group["scaled"]:
                    norms = weight.norm(), update.norm()
                    ratio = norms[0] / norms[1]
                    # As a tensor: to look at the norms here would wait for the device, once for each weight.
                    update.mul_(torch.where((norms[0] > 0) & (norms[1] > 0), ratio, torch.ones_like(ratio)))
                weight.add_(update, alpha=-group["lr"])

    def _update(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        state = self.state[weight]
        if not state:
            state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        assert weight.grad is not None
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_()
        return mean.div_(root.add_(group["eps"])).add_(weight, alpha=group["weight_decay"])
