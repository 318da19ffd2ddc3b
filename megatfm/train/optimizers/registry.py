from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatfm.engines import OptimizerGroup
from megatfm.registry import Registry

Shapes = Mapping[str, Sequence[int]]
"""Parameter name → global shape."""

OPTIMIZERS: Registry[Callable[[Any, Shapes], list[OptimizerGroup]]] = Registry("optimizer")
