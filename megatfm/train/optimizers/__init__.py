"""Optimizers by name: each shares a model's parameters out among groups of torch optimizers."""

from torch import nn

from megatfm.config import ModelConfig, OptimizerSection
from megatfm.engines.interface import OptimizerGroup
from megatfm.errors import MegatfmError, UsageError
from megatfm.models import lr_scales
from megatfm.train.optimizers.adafactor import adafactor
from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.lamb import lamb
from megatfm.train.optimizers.lion import lion
from megatfm.train.optimizers.muon import muon
from megatfm.train.optimizers.parameters import ParameterInfo, parameter_table
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters
from megatfm.train.optimizers.schedule_free import schedule_free
from megatfm.train.optimizers.soap import soap

__all__ = [
    "OPTIMIZERS",
    "ParameterInfo",
    "Parameters",
    "adafactor",
    "adamw",
    "lamb",
    "lion",
    "muon",
    "optimizer_groups",
    "parameter_table",
    "schedule_free",
    "soap",
]


def optimizer_groups(config: OptimizerSection, model: nn.Module) -> list[OptimizerGroup]:
    """The groups of a config's optimizer for a model that is not yet cut into shards.

    Raises UsageError for an unknown name or one that does not go with muP, MegatfmError when the optimizer leaves a
    parameter out or takes it twice.
    """
    scales = lr_scales(model, model.config) if isinstance(model.config, ModelConfig) else {}
    parameters = parameter_table(model, config, scales)
    groups = [group for group in OPTIMIZERS.get(config.name)(config, parameters) if group.names]
    if scales and any(group.granularity == "whole_tensor" for group in groups):
        raise UsageError(
            f"optimizer.name = {config.name!r} sizes its updates by the whole tensor, and model.mup scales rates for "
            "Adam's: choose adamw, lion or schedule_free_adamw, or leave model.mup out"
        )
    taken = [name for group in groups for name in group.names]
    for name in parameters:
        if taken.count(name) != 1:
            raise MegatfmError(
                f"optimizer {config.name!r} has {name} in {taken.count(name)} groups: each parameter belongs in one"
            )
    return groups
