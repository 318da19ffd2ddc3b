"""Muon (Jordan et al. 2024), from torch: momentum, orthogonalised, for the matrices of the blocks."""

from torch import Tensor
from torch.optim import Muon

from megatfm.config import MuonConfig
from megatfm.engines import OptimizerGroup
from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.registry import OPTIMIZERS, Shapes


@OPTIMIZERS.register("muon")
def muon(config: MuonConfig, shapes: Shapes) -> list[OptimizerGroup]:
    """Muon for 2-dimensional weights inside `layers`, AdamW for embedding, head and vectors."""

    def make(parameters: list[Tensor]) -> Muon:
        return Muon(
            parameters, lr=config.matrix_lr, momentum=config.momentum, weight_decay=config.weight_decay
        )

    matrices = [name for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2]
    rest = {name: shape for name, shape in shapes.items() if name not in matrices}
    groups = (
        [OptimizerGroup(matrices, "whole_tensor", make, config.matrix_lr / config.lr)] if matrices else []
    )
    return groups + adamw(config, rest)
