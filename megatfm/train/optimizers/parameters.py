"""What optimizers ask of a parameter: its shape, whether it decays, and its own learning rate."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn

from megatfm.config import OptimizerSection
from megatfm.errors import MegatfmError
from megatfm.layers.norm import NORMS

Role = Literal["matrix", "matrices", "embedding", "vector"]

NO_SCALES: Mapping[str, float] = MappingProxyType({})
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
MTP_HEAD = re.compile(r"^future\.")
"""A head that predicts later tokens has blocks of its own, above the stack's."""
INPUT_MODULES = re.compile(r"(?:^|\.)(?:embedding|position)\.")
"""In the name of what lies below a stack's layers."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the whole model, whatever the layout.

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
        """What Muon and SOAP are for: a matrix, or a stack of them."""
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
    """How far a parameter lies below the output (Bao et al. 2022, BEiT's layer-wise decay).

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
    """By the module that owns a parameter, not by the number of dims alone: a bias for each head has two."""
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
