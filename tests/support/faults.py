"""Helpers to plant faults, and faults where ranks share experts."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.parallel import collectives, expert_parallel
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.mesh import DENSE_DATA_AXES
from tests.support.expert_parity import MOE_OPTIONS

Backward = Callable[..., tuple[Any, ...]]
EVERYTHING = {"*"}
"""Patterns of all parameters whose gradient is not zero on one device."""


def patch_backward(patch: pytest.MonkeyPatch, function: type[torch.autograd.Function], backward: Backward) -> None:
    """Replace the backward pass of a function."""
    patch.setattr(function, "backward", staticmethod(backward))


def list_expected_errors(model: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Return the parameters of a model with gradients whose gradients a fault makes wrong.

    patterns: of names, each of which matches some; those behind a minus are left out. A bias of keys shifts all scores
    of a query alike, and so has no gradient under a softmax: only a pattern with `wk` in it stands for one in which a
    fault leaves a gradient.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bound = 1e-12 * torch.cat([g.flatten() for g in gradients.values()]).norm()
    zero = {name for name, gradient in gradients.items() if gradient.norm() <= bound}
    assert all(fnmatchcase(name, "*.wk*.bias") for name in zero), sorted(zero)

    for pattern in patterns:
        assert any(fnmatchcase(name, pattern.removeprefix("-")) for name in gradients), pattern

    def is_expected(name: str) -> bool:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("-"))]
        return any(name not in zero or "wk" in p for p in matching) and not any(p.startswith("-") for p in matching)

    expected = set(filter(is_expected, gradients))
    assert expected
    return expected


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
