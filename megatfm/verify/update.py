"""Weights after one step of the plain optimizer: whole tensors on one process, without an engine."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.engines.interface import NeedsShardLocations, OptimizerGroup, ShardLocation
from megatfm.train.build import build_model
from megatfm.train.optimizers import optimizer_groups
from megatfm.verify.reference import initialise_perturbed

CLIPPED = 1e-6
"""Added to the norm by which gradients are clipped, as torch does."""


def plain_weights(config: Config) -> dict[str, Tensor]:
    """Name → weight [whole shape] before the step, in float64, of those that are trained."""
    model = build_model(config).double()
    initialise_perturbed(model, config.train.seed)
    return {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}


def plain_step(
    config: Config, model: nn.Module, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Name → weight after the first step of the config's optimizer. model: any that the weights belong to.

    gradients: before they are clipped. Give those that the layout computed: an update amplifies their rounding where
    they are nearly zero (Adam divides by their size).
    """
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
    clip = config.optimizer.max_grad_norm
    factor = clip / (float(norm) + CLIPPED) if clip and norm > clip else 1.0
    moved = {name: weight.clone() for name, weight in weights.items()}
    for group in optimizer_groups(config.optimizer, model):
        of_group = {name: moved[name] for name in group.names if name in moved}
        _step(
            group,
            of_group,
            {name: gradients[name].to(moved[name]) * factor for name in of_group},
            config.optimizer.lr,
        )
    return moved


def _step(
    group: OptimizerGroup, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
) -> None:
    """Move weights in place."""
    if not weights:
        return

    def parts(name: str, tensor: Tensor) -> list[Tensor]:
        return list(tensor) if name in group.stacked_names else [tensor]

    split = {name: parts(name, weight) for name, weight in weights.items()}
    options: list[dict[str, Any]] = []
    for names, shared in group.parameter_groups(weights):
        options.append({**shared, "params": [part for name in names for part in split[name]]})
    optimizer = group.build(options)
    for shared in optimizer.param_groups:
        shared["lr"] = lr * shared["lr_ratio"]
    for name, gradient in gradients.items():
        for part, of_part in zip(split[name], parts(name, gradient), strict=True):
            part.grad = of_part.clone()
    if isinstance(optimizer, NeedsShardLocations):
        whole = (0,) * 8
        optimizer.set_shard_locations(
            {
                weight: ShardLocation(name, tuple(weight.shape), whole[: weight.dim()])
                for name, weight in weights.items()
            }
        )
    optimizer.step()
