"""Muon (Jordan et al. 2024), from torch: momentum, orthogonalised, for the matrices of the blocks."""

from typing import Any

from torch.optim import Muon, Optimizer

from megatfm.config import MuonConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.groups import lr_scales, split, stacks, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters
from megatfm.train.optimizers.stacked_muon import StackedMuon


@OPTIMIZERS.register("muon")
def muon(config: MuonConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Muon for matrices inside `layers`, those of experts in stacks, on GPUs all of a shape; AdamW for embedding,
    head and vectors."""

    def alone(groups: list[dict[str, Any]]) -> Optimizer:
        if groups[0]["params"][0].device.type != "cpu" or config.newton_schulz == "full":
            return together(groups)
        return Muon(groups, lr=config.matrix_lr, momentum=config.momentum)

    def together(groups: list[dict[str, Any]]) -> StackedMuon:
        return StackedMuon(
            groups, lr=config.matrix_lr, momentum=config.momentum, in_bf16=config.newton_schulz == "bf16"
        )

    matrices, rest = split(parameters)
    options = weight_decays(matrices, config.weight_decay)
    rates = lr_scales(matrices, config.matrix_lr / config.lr)
    stacked = stacks(matrices)
    single = [name for name in matrices if name not in stacked]
    groups = [OptimizerGroup(single, "whole_tensor", alone, options, rates)]
    if stacked:
        several = [name for name in matrices if name in stacked]
        groups.append(OptimizerGroup(several, "whole_tensor", together, options, rates))
    return [*groups, *adamw(config, rest)]
