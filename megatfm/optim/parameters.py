"""Optimizer groups of a model: roles of parameters, weight decay, learning rate factors, and moving averages."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, OptimizerSection
from megatfm.engines.interface import OptimizerGroup
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import compute_mup_lr_scales
from megatfm.layers.norm import NORMS
from megatfm.registry import Registry

Role = Literal["matrix", "matrices", "embedding", "vector"]

NO_SCALES: Mapping[str, float] = MappingProxyType({})
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
MTP_HEAD = re.compile(r"^future\.")
"""Multi-token prediction heads, whose blocks come after the stack's."""
AVERAGE = "ema"
"""Key of the average in the optimizer state, where it is sharded, saved and restored like the moments."""
INPUT_MODULES = re.compile(r"(?:^|\.)(?:embedding|position|query|sketch)\.")
"""Parameters that a stack's layers read: embeddings, shared positions and projections, XLNet's first query."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the full model, independent of the layout.

    role: "embedding": a lookup table. "vector": norm weights, biases and other parameters with one value per channel or
    head, in any number of dims. "matrices": independent matrices stacked along the first dim (experts). "matrix": all
    others. in_block: whether it belongs to a transformer layer. lr_scale: factor on the learning rate.
    """

    shape: tuple[int, ...]
    role: Role
    decays: bool
    in_block: bool
    lr_scale: float = 1.0

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix (or stack of matrices) of a block, which Muon and SOAP optimize."""
        return self.in_block and (self.role == "matrices" or (self.role == "matrix" and len(self.shape) == 2))


def describe_parameters(
    model: nn.Module, config: OptimizerSection, scales: Mapping[str, float] = NO_SCALES
) -> dict[str, ParameterInfo]:
    """Return all trainable parameters of an unsharded model, by name; a tied one under its first name.

    Modules declare roles that names and shapes do not show, e.g. `self.roles = {"weight": "embedding"}`. scales: the
    model's learning rate factors (muP). Raises MegatfmError for a factor without a parameter.
    """
    modules, named_parameters = dict(model.named_modules()), dict(model.named_parameters())
    roles = _collect_roles(modules, named_parameters)
    if unknown := sorted(scales.keys() - roles.keys()):
        raise MegatfmError(f"there is a learning rate factor for {unknown[0]!r}, but the model has no such parameter")
    depths = _compute_depths_below_output(modules, named_parameters)
    return {
        name: ParameterInfo(
            shape=tuple(parameter.shape),
            role=roles[name],
            decays=roles[name] in ("matrix", "matrices") or (roles[name] == "embedding" and config.decay_embeddings),
            in_block=LAYER.search(name) is not None,
            lr_scale=scales.get(name, 1.0) * config.layer_decay ** depths[name],
        )
        for name, parameter in named_parameters.items()
        if parameter.requires_grad
    }


def _compute_depths_below_output(modules: Mapping[str, nn.Module], names: Collection[str]) -> dict[str, int]:
    """Return each parameter's depth below the output, for layer-wise learning rate decay (BEiT: Bao et al. 2022).

    0 after the blocks (norm, heads), 1 for the last block, n for the first of n blocks, n + 1 for embeddings and
    positions. Stacks, identified by the name before `layers.`, count separately; a shared embedding belongs to the
    stack in its name. A module between blocks, with the attribute `follows_block`, counts with the block before it.
    """
    depths = dict.fromkeys(names, 0)
    places = {name: name for name in depths if not MTP_HEAD.search(name)}
    for path, module in modules.items():
        if (block := getattr(module, "follows_block", None)) is not None:
            stack = path.rsplit(".", 2)[0]
            places |= {name: f"{stack}.layers.{block}." for name, _ in module.named_parameters(prefix=path)}
    n_layers: dict[str, int] = {}
    for place in places.values():
        if layer := LAYER.search(place):
            stack = place[: layer.start()]
            n_layers[stack] = max(n_layers.get(stack, 0), int(layer[1]) + 1)
    for name, place in places.items():
        if layer := LAYER.search(place):
            depths[name] = n_layers[place[: layer.start()]] - int(layer[1])
        elif input_module := INPUT_MODULES.search(place):
            depths[name] = n_layers.get(place[: input_module.start()], 0) + 1
    return depths


def _collect_roles(modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]) -> dict[str, Role]:
    """Return each parameter's role, by its module: the number of dims is no criterion (per-head biases have two)."""
    norms = tuple(norm_class for name in NORMS.names() if isinstance(norm_class := NORMS.get(name), type))
    roles: dict[str, Role] = {}
    for name, parameter in parameters.items():
        path, _, key = name.rpartition(".")
        module = modules[path]
        declared: Role | None = getattr(module, "roles", {}).get(key)
        if declared:
            roles[name] = declared
        elif isinstance(module, norms) or parameter.dim() <= 1 or key.endswith("bias"):
            roles[name] = "vector"
        else:
            roles[name] = "matrix"
    return roles


Parameters = Mapping[str, ParameterInfo]
"""Parameters by name."""

OPTIMIZERS: Registry[Callable[[Any, Parameters], list[OptimizerGroup]]] = Registry("optimizer")
"""Optimizers by name: (config section, parameters) → optimizer groups."""


def make_weight_decay_options(parameters: Parameters, weight_decay: float) -> dict[str, Mapping[str, Any]]:
    """Return the option `weight_decay` of each parameter; 0 if it does not decay."""
    return {name: {"weight_decay": weight_decay if p.decays else 0.0} for name, p in parameters.items()}


def compute_lr_scales(parameters: Parameters, ratio: float = 1.0) -> dict[str, float]:
    """Return each parameter's learning rate factor. ratio: the group's learning rate relative to the run's."""
    return {name: ratio * p.lr_scale for name, p in parameters.items()}


def split_block_matrices(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Divide parameters into the blocks' matrices and all others."""
    matrices = {name: p for name, p in parameters.items() if p.is_block_matrix}
    return matrices, {name: p for name, p in parameters.items() if name not in matrices}


def list_stacked_names(parameters: Parameters) -> frozenset[str]:
    """Return the names of parameters that are stacks of matrices."""
    return frozenset(name for name, p in parameters.items() if p.role == "matrices")


def build_optimizer_groups(config: OptimizerSection, model: nn.Module) -> list[OptimizerGroup]:
    """Return the optimizer groups of a config for an unsharded model.

    Raises UsageError for an unknown optimizer or one that does not work with muP, MegatfmError if a parameter is in no
    group or in several.
    """
    scales = compute_mup_lr_scales(model, model.config) if isinstance(model.config, ModelConfig) else {}
    parameters = describe_parameters(model, config, scales)
    groups = [group for group in OPTIMIZERS.get(config.name)(config, parameters) if group.names]
    if config.ema_decay is not None:
        groups = [with_weight_average(group, config.ema_decay, config.name) for group in groups]
    if scales and any(group.granularity == "whole_tensor" for group in groups):
        raise UsageError(
            f"optimizer.name = {config.name!r} sizes its updates by the whole tensor, and model.mup scales rates for "
            "Adam's updates: choose adamw, lion or schedule_free_adamw, or leave model.mup out"
        )
    n_groups = Counter(name for group in groups for name in group.names)
    for name in parameters:
        if n_groups[name] != 1:
            raise MegatfmError(
                f"optimizer {config.name!r} has {name} in {n_groups[name]} groups: each parameter must "
                "be in exactly one"
            )
    return groups


def with_weight_average(group: OptimizerGroup, decay: float, name: str) -> OptimizerGroup:
    """Return the group with an exponential moving average, ema ← decay · ema + (1 − decay) · weight after each step.

    The average starts at the weights after the first step; it is evaluated and saved. name: the optimizer's. Raises
    UsageError for optimizers that average weights themselves, or have low-precision moments.
    """
    for is_refused, reason in (
        (group.averaged is not None, "averages weights itself"),
        (group.state_dtype is not None, "keeps its state in another precision (moments_dtype)"),
    ):
        if is_refused:
            raise UsageError(
                f"optimizer.ema_decay = {decay:g}: optimizer.name = {name!r} {reason}: choose adamw, lion, muon, "
                "soap, adafactor or lamb, without moments_dtype, or leave ema_decay out"
            )

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = group.build(groups)
        optimizer.register_step_post_hook(lambda stepped, *_: update_average(stepped, decay))
        return optimizer

    return replace(group, build=build, averaged=get_average)


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


def get_average(block: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """Return the average of a weight, or the weight itself if the run so far had no average."""
    return state.get(AVERAGE, block).clone()
