from collections.abc import Callable, Mapping
from typing import Any

from megatfm.engines.interface import OptimizerGroup
from megatfm.registry import Registry
from megatfm.train.optimizers.parameters import ParameterInfo

Parameters = Mapping[str, ParameterInfo]
"""Parameter name → what an optimizer asks of it."""

OPTIMIZERS: Registry[Callable[[Any, Parameters], list[OptimizerGroup]]] = Registry("optimizer")
"""Each takes its config section and the model's parameters, and shares these out among groups."""
