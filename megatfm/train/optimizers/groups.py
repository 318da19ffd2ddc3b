"""What the optimizers' files share."""

from collections.abc import Mapping
from typing import Any

from megatfm.train.optimizers.registry import Parameters


def weight_decays(parameters: Parameters, weight_decay: float) -> dict[str, Mapping[str, Any]]:
    """The option `weight_decay` of each parameter: 0 for those that don't decay."""
    return {name: {"weight_decay": weight_decay if p.decays else 0.0} for name, p in parameters.items()}


def lr_scales(parameters: Parameters, ratio: float = 1.0) -> dict[str, float]:
    """The rate of each parameter as a multiple of the run's, where a group's own is `ratio` times that."""
    return {name: ratio * p.lr_scale for name, p in parameters.items()}


def split_block_matrices(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """The blocks' matrices, and all the rest."""
    matrices = {name: p for name, p in parameters.items() if p.is_block_matrix}
    return matrices, {name: p for name, p in parameters.items() if name not in matrices}


def stacked_names(parameters: Parameters) -> frozenset[str]:
    """Names of the parameters that are several matrices."""
    return frozenset(name for name, p in parameters.items() if p.role == "matrices")
