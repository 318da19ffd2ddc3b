"""The parameters that an optimizer moves: role, decay, rate of each; and how a config's optimizer shares them out among
groups of torch optimizers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from megatfm.config import ModelConfig, OptimizerSection
from megatfm.engines.interface import OptimizerGroup
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.norm import NORMS
from megatfm.models import lr_scales as mup_lr_scales
from megatfm.optim.weight_average import with_weight_average
from megatfm.registry import Registry

Role = Literal["matrix", "matrices", "embedding", "vector"]

NO_SCALES: Mapping[str, float] = MappingProxyType({})
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
MTP_HEAD = re.compile(r"^future\.")
"""A head that predicts later tokens has its own blocks, above the stack's."""
INPUT_MODULES = re.compile(r"(?:^|\.)(?:embedding|position)\.")
"""Matches names of what lies below a stack's layers."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the full model, independent of the layout.

    role: embedding: a table whose rows are looked up; vector: a norm's gain, a bias, and whatever else is a number
    for each channel or head, also stacked in more dims; matrices: those of experts, stacked along the first dim, each a
    weight of its own; matrix: all others.
    in_block: whether it lies in one of the stacked layers. lr_scale: its rate as a multiple of the run's.
    """

    shape: tuple[int, ...]
    role: Role
    decays: bool
    in_block: bool
    lr_scale: float = 1.0

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix of a block, or a stack of them: what Muon and SOAP are for."""
        return self.in_block and (self.role == "matrices" or (self.role == "matrix" and len(self.shape) == 2))


def parameter_table(
    model: nn.Module, config: OptimizerSection, scales: Mapping[str, float] = NO_SCALES
) -> dict[str, ParameterInfo]:
    """Every parameter that is trained, of a model that is not yet cut into shards; a tied one under its first name.

    A module names the roles that are not to be seen otherwise, e.g. `self.roles = {"weight": "embedding"}`.
    scales: rates of the model's own, as muP has them. Raises MegatfmError for a scale of no parameter.
    """
    roles = _roles(model)
    if unknown := sorted(scales.keys() - roles.keys()):
        raise MegatfmError(f"a rate is given for {unknown[0]!r}, which is no parameter of the model")
    heights = depths_below_output(list(roles))
    return {
        name: ParameterInfo(
            shape=tuple(parameter.shape),
            role=roles[name],
            decays=roles[name] in ("matrix", "matrices")
            or (roles[name] == "embedding" and config.decay_embeddings),
            in_block=LAYER.search(name) is not None,
            lr_scale=scales.get(name, 1.0) * config.layer_decay ** heights[name],
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def depths_below_output(all_names: Sequence[str]) -> dict[str, int]:
    """Return how far each parameter lies below the output (Bao et al. 2022, BEiT's layer-wise decay).

    0 for what follows the blocks (norm, heads with all that is in them), 1 for the last block, n for the first of n,
    n + 1 for embeddings and positions. Each stack counts for itself, by what comes before `layers.` in the name;
    embeddings that stacks share go with the one that they are named after.
    """
    tops: dict[str, int] = {}
    names = [name for name in all_names if not MTP_HEAD.search(name)]
    for name in names:
        if layer := LAYER.search(name):
            stack = name[: layer.start()]
            tops[stack] = max(tops.get(stack, 0), int(layer[1]) + 1)
    heights = dict.fromkeys(all_names, 0)
    for name in names:
        if layer := LAYER.search(name):
            heights[name] = tops[name[: layer.start()]] - int(layer[1])
        elif below := INPUT_MODULES.search(name):
            heights[name] = tops.get(name[: below.start()], 0) + 1
    return heights


def _roles(model: nn.Module) -> dict[str, Role]:
    """Return each parameter's role by the module that owns it: the number of dims misleads, a bias for each head has
    two."""
    norms = tuple(part for name in NORMS.names() if isinstance(part := NORMS.get(name), type))
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        declared: Role | None = getattr(module, "roles", {}).get(key)
        if declared:
            roles[name] = declared
        elif isinstance(module, norms) or parameter.dim() <= 1 or key.endswith("bias"):
            roles[name] = "vector"
        else:
            roles[name] = "matrix"
    return roles


Parameters = Mapping[str, ParameterInfo]
"""Parameter name → what an optimizer asks of it."""

OPTIMIZERS: Registry[Callable[[Any, Parameters], list[OptimizerGroup]]] = Registry("optimizer")
"""Each takes its config section and the model's parameters, and shares these out among groups."""


def weight_decays(parameters: Parameters, weight_decay: float) -> dict[str, Mapping[str, Any]]:
    """The option `weight_decay` of each parameter: 0 for weights without decay."""
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


def optimizer_groups(config: OptimizerSection, model: nn.Module) -> list[OptimizerGroup]:
    """The groups of a config's optimizer for a model that is not yet cut into shards.

    Raises UsageError for an unknown name or one that does not go with muP, MegatfmError when the optimizer leaves a
    parameter out or takes it twice.
    """
    scales = mup_lr_scales(model, model.config) if isinstance(model.config, ModelConfig) else {}
    parameters = parameter_table(model, config, scales)
    groups = [group for group in OPTIMIZERS.get(config.name)(config, parameters) if group.names]
    if config.ema_decay is not None:
        groups = [with_weight_average(group, config.ema_decay, config.name) for group in groups]
    if scales and any(group.granularity == "whole_tensor" for group in groups):
        raise UsageError(
            f"optimizer.name = {config.name!r} sizes its updates by the whole tensor, and model.mup scales rates for "
            "Adam's: choose adamw, lion or schedule_free_adamw, or leave model.mup out"
        )
    grouped_names = [name for group in groups for name in group.names]
    for name in parameters:
        if grouped_names.count(name) != 1:
            raise MegatfmError(
                f"optimizer {config.name!r} has {name} in {grouped_names.count(name)} groups: each parameter "
                "belongs in one"
            )
    return groups
