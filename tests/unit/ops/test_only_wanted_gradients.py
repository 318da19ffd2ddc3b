"""Products that make gradients are made of what a gradient is wanted for: none in evaluation, one of a frozen part."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.ops.cross_entropy import cross_entropy
from megatfm.ops.fp8 import fp8_linear
from megatfm.ops.grouped_mm import bucketed_linear

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.mm.out, aten.addmm.out, aten.addmm_.default, aten._scaled_mm.default}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def loss_of(x: Tensor, weight: Tensor) -> Tensor:
    return cross_entropy(x, weight, torch.arange(len(x)) % len(weight), chunk=16)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return bucketed_linear(x, weight.view(2, 16, -1), torch.tensor([20, 32], dtype=torch.int32))


# function: products forward, and for each gradient; a loss makes its gradients in the forward pass
CASES: dict[Callable[..., Tensor], tuple[int, int]] = {loss_of: (2, 2), grouped: (2, 2), fp8_linear: (1, 1)}


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_backward_has_only_the_products_it_needs(
    function: Callable[..., Tensor], of_x: bool, of_weight: bool, training: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(32, 16, generator=random).bfloat16() for _ in range(2))
    x.requires_grad_(of_x)
    parameter = nn.Parameter(weight, requires_grad=of_weight)
    forward, item = CASES[function]
    with Products() as products, nullcontext() if training else torch.no_grad():
        result = function(x, parameter).float().sum()
        if training and (of_x or of_weight):
            result.backward()
    assert products.made == forward + item * training * (of_x + of_weight)
    for tensor, wanted in ((x, of_x), (parameter, of_weight)):
        assert (tensor.grad is not None) == (training and wanted)
    if training and of_x and of_weight:
        expected = torch.autograd.grad(function(x, parameter).float().sum(), (x, parameter))
        assert torch.equal(expected[0], x.grad)  # type: ignore[arg-type]
        assert torch.equal(expected[1], parameter.grad)  # type: ignore[arg-type]
