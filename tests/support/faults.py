"""Helpers to plant faults, and faults where ranks share experts."""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.parallel import collectives, expert_parallel
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.mesh import DENSE_DATA_AXES
from tests.support.expert_models import MOE_OPTIONS

Backward = Callable[..., tuple[Any, ...]]
EVERYTHING = {"*"}
KEY_BIASES = "*.wk.bias"
"""Biases of keys where scores are plain products. Such a bias b adds q·b to all scores of a query q, and a softmax's
gradients of its scores, p_j (g_j − Σ_k p_k g_k), sum to zero. So that of b is zero, and no fault that leaves a softmax
and its gradient whole can make it wrong."""
ALL_BUT_KEY_BIASES = {"*", f"-{KEY_BIASES}"}


def match_parameters(parameters: Collection[str], patterns: Collection[str]) -> set[str]:
    """Return the parameters that match a pattern, less those that match one with a minus before it.

    A pattern that matches none is an error.
    """
    names = {pattern: {name for name in parameters if fnmatchcase(name, pattern.lstrip("-"))} for pattern in patterns}
    assert all(names.values()), names
    added, removed = ([names[p] for p in patterns if p.startswith("-") is is_minus] for is_minus in (False, True))
    return set().union(*added) - set().union(*removed)


def parameters_without_gradient(model: nn.Module) -> set[str]:
    """Parameters whose gradient is nothing beside that of the model: their errors are taken against its floor."""
    norms = {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    return {name for name, norm in norms.items() if norm <= 1e-14 * max(norms.values())}


def patch_backward(patch: pytest.MonkeyPatch, function: type[torch.autograd.Function], backward: Backward) -> None:
    """Replace the backward pass of a function."""
    patch.setattr(function, "backward", staticmethod(backward))


Patch = pytest.MonkeyPatch


def forget_the_weights_other_shares(patch: Patch) -> None:
    """The gradient of what experts are weighted by is that of the own experts alone."""
    genuine = TensorParallelGroup.gather_input

    def enter(self: TensorParallelGroup, x: Tensor) -> Tensor:
        return self.gather_replicated(x) if x.shape[-1] == MOE_OPTIONS["top_k"] else genuine(self, x)

    patch.setattr(TensorParallelGroup, "gather_input", enter)


def take_experts_for_everybody_s(patch: Patch) -> None:
    """Gradients of experts are summed over ranks that hold others."""
    patch.setattr(expert_parallel, "EXPERT_DATA_AXES", DENSE_DATA_AXES)


def leave_rows_in_the_order_of_experts(patch: Patch) -> None:
    """Rows that come back from experts are not sorted by token."""
    genuine = expert_parallel.sort_rows_by_expert

    def unsorted(counts_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        order_R, _ = genuine(counts_PE, rows)
        return order_R, torch.arange(rows)

    patch.setattr(expert_parallel, "sort_rows_by_expert", unsorted)


def bring_gradients_back_in_another_order(patch: Patch) -> None:
    """Gradients of rows come back in reverse."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradient = collectives.all_to_all_no_grad(gradient, ctx.received, ctx.sent, ctx.group)
        return gradient.flip(0), None, None, None

    patch.setattr(collectives._AllToAll, "backward", staticmethod(backward))
