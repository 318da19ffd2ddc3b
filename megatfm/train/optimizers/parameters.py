"""What optimizers ask of a parameter: its shape, whether it decays, and its own learning rate."""

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

from megatfm.config import OptimizerSection
from megatfm.errors import MegatfmError
from megatfm.layers.norm import NORMS

Role = Literal["matrix", "embedding", "vector"]

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the whole model, whatever the layout.

    role: embedding: a table whose rows are looked up; vector: a norm's gain, a bias, and whatever else is a number
    for each channel or head, also stacked in more dims; matrix: all others.
    in_block: whether it lies in one of the stacked layers. lr_scale: its rate as a multiple of the run's.
    """

    shape: tuple[int, ...]
    role: Role
    decays: bool
    in_block: bool
    lr_scale: float = 1.0

    @property
    def is_block_matrix(self) -> bool:
        """What Muon and SOAP are for."""
        return self.in_block and self.role == "matrix" and len(self.shape) == 2


def parameter_table(model: nn.Module, config: OptimizerSection) -> dict[str, ParameterInfo]:
    """Every parameter of a model that is not yet cut into shards, a tied one under its first name.

    A module names the role of its parameters where it can't be told from elsewhere: `roles = {"keys": "embedding"}`.
    A model may have rates of its own: `lr_scales() -> dict[str, float]`. Raises MegatfmError for a scale of no
    parameter.
    """
    roles = _roles(model)
    scales = dict(getattr(model, "lr_scales", dict)())
    if unknown := sorted(scales.keys() - roles.keys()):
        raise MegatfmError(
            f"{type(model).__name__}.lr_scales names {unknown[0]!r}, which is no parameter of it"
        )
    heights = heights_from_the_top(roles)
    return {
        name: ParameterInfo(
            shape=tuple(parameter.shape),
            role=roles[name],
            decays=roles[name] == "matrix" or (roles[name] == "embedding" and config.decay_embeddings),
            in_block=LAYER.search(name) is not None,
            lr_scale=scales.get(name, 1.0) * config.layer_decay ** heights[name],
        )
        for name, parameter in model.named_parameters()
    }


def heights_from_the_top(roles: dict[str, Role]) -> dict[str, int]:
    """How many blocks lie above a parameter, plus one inside them (Bao et al. 2022, BEiT's fine-tuning).

    0 for what follows the blocks (norm, head), 1 for the last block, n for the first of n, n + 1 for embeddings.
    Each stack counts for itself, by what comes before `layers.` in the name; an embedding of no stack lies below the
    highest of them.
    """
    tops: dict[str, int] = {}
    for name in roles:
        if layer := LAYER.search(name):
            stack = name[: layer.start()]
            tops[stack] = max(tops.get(stack, 0), int(layer[1]) + 1)
    heights = {}
    for name, role in roles.items():
        if layer := LAYER.search(name):
            heights[name] = tops[name[: layer.start()]] - int(layer[1])
        elif role == "embedding" or "embedding" in name.split("."):
            own = [top for stack, top in tops.items() if name.startswith(f"{stack}.")]
            heights[name] = max(own or tops.values(), default=0) + 1
        else:
            heights[name] = 0
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
        elif type(module).__name__.endswith(("Embedding", "Table", "Positions")):
            roles[name] = "embedding"
        else:
            roles[name] = "matrix"
    return roles
