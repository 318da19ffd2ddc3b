"""Helpers to plant faults."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Backward = Callable[..., tuple[Any, ...]]
EVERYTHING = {"*"}


def patch_backward(
    patch: pytest.MonkeyPatch, function: type[torch.autograd.Function], backward: Backward
) -> None:
    """Replace the backward pass of a function."""
    patch.setattr(function, "backward", staticmethod(backward))
