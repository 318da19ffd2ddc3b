"""Running a module by another function than its class's `forward`, from outside."""

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have `module(*inputs)` run `forward(*inputs)`, with the module's hooks around it; no other module changes."""
    vars(module)["forward"] = forward
