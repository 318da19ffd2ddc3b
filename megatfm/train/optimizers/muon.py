"""Muon (Jordan et al. 2024), from torch: momentum, orthogonalised, for the matrices of the blocks."""

from typing import Any

from torch.optim import Muon

from megatfm.config import MuonConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.groups import lr_scales, split, stacks, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters


@OPTIMIZERS.register("muon")
def muon(config: MuonConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Muon for matrices inside `layers`, AdamW for embedding, head and vectors."""

    def make(groups: list[dict[str, Any]]) -> Muon:
        return Muon(groups, lr=config.matrix_lr, momentum=config.momentum)

    matrices, rest = split(parameters)
    options = weight_decays(matrices, config.weight_decay)
    rates = lr_scales(matrices, config.matrix_lr / config.lr)
    names, stacked = list(matrices), stacks(matrices)
    group = OptimizerGroup(names, "whole_tensor", make, options, rates, stacked=stacked)
    return [group, *adamw(config, rest)]
