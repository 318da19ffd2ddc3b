"""Muon (Jordan et al. 2024), from torch: momentum, orthogonalised, for the matrices of the blocks."""

from typing import Any

from torch.optim import Muon, Optimizer

from megatfm.config import MuonConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.groups import lr_scales, split_block_matrices, stacked_names, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters
from megatfm.train.optimizers.stacked_muon import BatchedMuon


@OPTIMIZERS.register("muon")
def muon(config: MuonConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Muon for matrices inside `layers`, those of experts in stacks, on GPUs all of a shape; AdamW for embedding,
    head and vectors."""

    def make_muon(groups: list[dict[str, Any]]) -> Optimizer:
        if groups[0]["params"][0].device.type != "cpu" or config.newton_schulz_dtype == "param":
            return make_batched_muon(groups)
        return Muon(groups, lr=config.matrix_lr, momentum=config.momentum)

    def make_batched_muon(groups: list[dict[str, Any]]) -> BatchedMuon:
        return BatchedMuon(
            groups,
            lr=config.matrix_lr,
            momentum=config.momentum,
            in_bf16=config.newton_schulz_dtype == "bf16",
        )

    matrices, rest = split_block_matrices(parameters)
    options = weight_decays(matrices, config.weight_decay)
    rates = lr_scales(matrices, config.matrix_lr / config.lr)
    stacked = stacked_names(matrices)
    single = [name for name in matrices if name not in stacked]
    groups = [OptimizerGroup(single, "whole_tensor", make_muon, options, rates)]
    if stacked:
        several = [name for name in matrices if name in stacked]
        groups.append(OptimizerGroup(several, "whole_tensor", make_batched_muon, options, rates))
    return [*groups, *adamw(config, rest)]
