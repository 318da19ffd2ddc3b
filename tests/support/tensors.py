"""Drawn tensors, modules none of whose parameters is where it starts, and comparisons of values and gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, which follow from shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def move_parameters(module: nn.Module, scale: float, seed: int = 2) -> Any:
    """Draw every parameter of a module, in float64."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """Compare two results, and every gradient of a drawn sum of their numbers."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    y = draw(*expected.shape, seed=1).to(expected.dtype)
    gradients = [torch.autograd.grad(result, inputs, y, retain_graph=True) for result in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=rtol, atol=atol)
