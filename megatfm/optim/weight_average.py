"""Exponential moving average (EMA) of the weights, for elementwise optimizers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatfm.engines.interface import OptimizerGroup
from megatfm.errors import UsageError

AVERAGE = "ema"
"""Key of the average in the optimizer state, where it is sharded, saved and restored like the moments."""


def with_weight_average(group: OptimizerGroup, decay: float, name: str) -> OptimizerGroup:
    """Return the group with an average ema ← decay · ema + (1 − decay) · weight after each step.

    The average starts at the weights after the first step; it is evaluated and saved. name: the optimizer's. Raises
    UsageError for optimizers that need full tensors, average weights themselves, or have low-precision moments.
    """
    for is_refused, reason in (
        (group.granularity != "elementwise", "needs full tensors"),
        (group.averaged is not None, "averages weights itself"),
        (group.state_dtype is not None, "keeps its state in another precision (moments_dtype)"),
    ):
        if is_refused:
            raise UsageError(
                f"optimizer.ema_decay = {decay:g}: optimizer.name = {name!r} {reason}: choose adamw or lion, or leave "
                "ema_decay out"
            )

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = group.build(groups)
        optimizer.register_step_post_hook(lambda moved, *_: update_average(moved, decay))
        return optimizer

    return replace(group, build=build, averaged=average_of)


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Update the averages of all weights, unless the step was skipped on the device (`found_inf`)."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    for options in optimizer.param_groups:
        for weight in options["params"]:
            state = optimizer.state[weight]
            if AVERAGE not in state:
                state[AVERAGE] = weight.detach().clone()
            elif found_inf is None:
                state[AVERAGE].lerp_(weight, 1 - decay)
            else:
                state[AVERAGE].lerp_(weight, ((1 - decay) * (1 - found_inf)).to(weight.dtype))


def average_of(block: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """Return the average of a weight, or the weight itself if the run so far had no average."""
    return state.get(AVERAGE, block).clone()
