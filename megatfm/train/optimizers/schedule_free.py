"""Schedule-free AdamW (Defazio et al. 2024), from the authors' package.

The model's parameters hold y, the point at which gradients are taken; what is evaluated and saved is x, the average.
"""

from collections.abc import Mapping
from typing import Any

from schedulefree import AdamWScheduleFree
from torch import Tensor

from megatfm.config import ScheduleFreeConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.groups import lr_scales, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters


@OPTIMIZERS.register("schedule_free_adamw")
def schedule_free(config: ScheduleFreeConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """One group, decay by role. Warm-up is the schedule's, as for all optimizers."""

    def make(groups: list[dict[str, Any]]) -> AdamWScheduleFree:
        optimizer = AdamWScheduleFree(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        optimizer.train()  # for good: its eval() moves the weights there and back, and not to the last bit
        return optimizer

    return [
        OptimizerGroup(
            list(parameters),
            "elementwise",
            make,
            weight_decays(parameters, config.weight_decay),
            lr_scales(parameters),
            counters=("k", "weight_sum", "lr_max"),
            averaged=evaluation_weights,
        )
    ]


def evaluation_weights(block: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """x, from y = (1 − β₁)z + β₁x."""
    return block.lerp(state["z"], 1 - 1 / options["betas"][0])
