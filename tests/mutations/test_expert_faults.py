"""Faults where ranks share experts: the comparison with one device must find each of them.

Slow cases share experts in other ways: folded over tensor-parallel ranks or parts of rows, cut by channels, beside
shared experts, and moved in stacks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatfm.config import ParallelConfig
from megatfm.engines import base
from megatfm.layers.moe.experts import Experts
from megatfm.layers.moe.moe import MoE
from megatfm.optim import matrix_optimizers
from megatfm.optim.matrix_optimizers import Soap
from megatfm.parallel import collectives, cp_plans, expert_parallel
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.mesh import DENSE_DATA_AXES, Mesh
from tests.support.batches import family_batch
from tests.support.expert_parity import (
    EP2,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    MOE_OPTIONS,
    TP2,
    second_step,
    two_steps_on_one_device,
)
from tests.support.parity import EVERYTHING, list_expected_errors, model_gradient_errors
from tests.support.sharded_engines import check_stack_moves_as_matrices
from tests.support.workers import WorkerFailure, Workers

Patch = pytest.MonkeyPatch


def count_one_rank_s_choices(patch: Patch) -> None:
    """The shares that the next step is balanced by are those of one rank alone."""
    genuine = base.ModuleState.update

    def update(self: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Mesh, "all_reduce_", lambda self, tensor, axes: None)
            genuine(self)

    patch.setattr(base.ModuleState, "update", update)


def balance_parts_as_if_they_were_rows(patch: Patch) -> None:
    """A rank's part of the tokens has the shape of rows, but is the first of them."""
    patch.setattr(TensorParallelGroup, "sum_rows", lambda self, x_BTX: x_BTX.sum(1))


def give_each_rank_the_first_experts(patch: Patch) -> None:
    genuine = Experts.forward

    def forward(self: Experts, *inputs: Tensor) -> Any:
        self.first = 0
        return genuine(self, *inputs)

    patch.setattr(Experts, "forward", forward)


def average_over_the_ranks_of_experts(patch: Patch) -> None:
    real = FSDPModule.set_gradient_divide_factor

    def divide(self: FSDPModule, factor: float) -> None:
        real(self, 2.0 if isinstance(self, Experts) else factor)

    patch.setattr(FSDPModule, "set_gradient_divide_factor", divide)


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


def add_the_last_bias_everywhere(patch: Patch) -> None:
    patch.setattr(Experts, "down_bias_scale", property(lambda self: 1.0, lambda self, share: None), raising=False)


def limit_each_part_of_a_row(patch: Patch) -> None:
    """A capacity is filled by a rank's own tokens alone."""
    patch.setattr(TensorParallelGroup, "gather_replicated", lambda self, x: torch.cat([x, x], 1))


def forget_the_other_channels_gradient(patch: Patch) -> None:
    """Tokens get back the sum over this rank's channels alone."""
    patch.setattr(TensorParallelGroup, "gather_input", lambda self, x: self.gather_replicated(x))


def read_gradients_before_they_come(patch: Patch) -> None:
    patch.setattr(
        collectives._Start, "backward", staticmethod(lambda ctx, _: (torch.zeros_like(ctx.exchange.wait()), None))
    )


def forget_what_is_below_shared_ones(patch: Patch) -> None:
    """Their tokens get no gradient from shared experts."""
    share = MoE._add_shared_experts
    patch.setattr(
        MoE, "_add_shared_experts", lambda self, result, x, sequence: share(self, result, x.detach(), sequence)
    )


def count_shared_ones_twice(patch: Patch) -> None:
    """In the backward pass alone."""
    share = MoE._add_shared_experts

    def doubled(self: MoE, outputs: list[Tensor], x: Tensor, sequence: Any) -> None:
        share(self, outputs, x, sequence)
        outputs[-1] = 2 * outputs[-1] - outputs[-1].detach()

    patch.setattr(MoE, "_add_shared_experts", doubled)


def limit_parts_of_rows(patch: Patch) -> None:
    """A capacity is filled by the tokens here alone."""
    patch.setattr(cp_plans, "install_moe", lambda moe, contexts: None)


def leave_parts_in_the_order_of_ranks(patch: Patch) -> None:
    """Leave a row's choices in the order of ranks, each of which has a run from the front and one from the back."""

    def unsorted(contexts: Any, choices_BTK: Tensor, sequence: Any) -> Tensor:
        return genuine(contexts, choices_BTK, sequence)[:, torch.cat(contexts.token_indices(sequence.length))]

    genuine = cp_plans._gather_row
    patch.setattr(cp_plans, "_gather_row", unsorted)


BELOW_ROUTER = {"*", "-*.layers.1.ffn.experts.*", "-decoder.norm.*"}
BELOW_EXPERTS = {"*", "-*.layers.1.ffn.router.*", "-decoder.norm.*"}
BELOW_MOE = {"decoder.*", "-*.layers.1.ffn.*", "-decoder.norm.*"}
"""Parameters whose gradients come by way of the last router's weights, of its experts, of the layer's input."""
EXPERTS = {"*.ffn.experts.*"}
FOLDED, BY_CHANNEL = (EXPERT_TP_LAYOUTS[2][name] for name in ("ep2 of tp2", "tp2 by channels"))
OVER_PARTS = ParallelConfig(dp_shard=1, cp=2, ep=2, zero=0)
PARTS_OF_ROWS = ParallelConfig(dp_shard=1, cp=2)
Fault = Callable[[Patch], None]
FAULTS: list[tuple[Fault, str, ParallelConfig, set[str]]] = [
    (count_one_rank_s_choices, "top-k", ParallelConfig(dp_shard=2, zero=3), BELOW_ROUTER),
    (balance_parts_as_if_they_were_rows, "top-k", TP2, BELOW_ROUTER),
    (give_each_rank_the_first_experts, "top-k", TP2, EVERYTHING),
    (forget_the_weights_other_shares, "top-k", TP2, BELOW_ROUTER),
    (leave_rows_in_the_order_of_experts, "top-k", EP2, EVERYTHING),
    (bring_gradients_back_in_another_order, "top-k", EP2, BELOW_EXPERTS),
    (take_experts_for_everybody_s, "top-k", ParallelConfig(dp_shard=2, ep=2, zero=0), EXPERTS),
    (average_over_the_ranks_of_experts, "top-k", EP2, EXPERTS),
    (add_the_last_bias_everywhere, "deepseek-v3", BY_CHANNEL, {"*.experts.b_down"}),
    (limit_each_part_of_a_row, "switch", FOLDED, EVERYTHING),
]
SLOW_FAULTS: list[tuple[Fault, str, ParallelConfig, set[str]]] = [
    (leave_rows_in_the_order_of_experts, "by batch", FOLDED, EVERYTHING),
    (bring_gradients_back_in_another_order, "by batch", FOLDED, BELOW_EXPERTS),
    (forget_the_weights_other_shares, "by batch", BY_CHANNEL, BELOW_ROUTER),
    (forget_the_other_channels_gradient, "by batch", BY_CHANNEL, EVERYTHING),
    (take_experts_for_everybody_s, "by batch", OVER_PARTS, EXPERTS),
    (leave_rows_in_the_order_of_experts, "by batch", OVER_PARTS, EVERYTHING),
    (bring_gradients_back_in_another_order, "by batch", OVER_PARTS, BELOW_EXPERTS),
    (read_gradients_before_they_come, "deepseek-v3", EP2, BELOW_MOE),
    (forget_what_is_below_shared_ones, "deepseek-v3", EP2, BELOW_MOE),
    (count_shared_ones_twice, "deepseek-v3", EP2,
     {"decoder.*", "-*.ffn.experts.*", "-*.ffn.router.*", "-decoder.norm.*"}),
    (limit_parts_of_rows, "switch", PARTS_OF_ROWS, EVERYTHING),
    (leave_parts_in_the_order_of_ranks, "switch", PARTS_OF_ROWS, EVERYTHING),
]  # fmt: skip
"""Fault, model and layout that show it, and parameters whose gradients must be found wrong, and no others."""


@cache
def reference(name: str) -> tuple[nn.Module, Any, list[float]]:
    """Two steps of one device: computed once in a process for all faults."""
    return two_steps_on_one_device(EXPERT_MODELS[name], family_batch(EXPERT_MODELS[name]))


def wrong(fault: str | None, name: str, parallel: ParallelConfig) -> set[str]:
    """Parameters with a wrong gradient."""
    model, objective, _ = reference(name)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            globals()[fault](patch)
        engine, _ = second_step(EXPERT_MODELS[name], parallel, objective)
        return set(model_gradient_errors(engine, model))


@pytest.mark.parametrize(("fault", "name", "parallel", "patterns"), [
    *FAULTS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_FAULTS)
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_a_planted_fault_is_found(
    workers: Workers, fault: Fault, name: str, parallel: ParallelConfig, patterns: set[str]
) -> None:
    actual = set[str]().union(*workers.run(wrong, 2, fault.__name__, name, parallel, timeout=120.0))
    model, *_ = reference(name)
    assert actual == list_expected_errors(model, patterns)


@pytest.mark.parametrize(("name", "parallel"), [
    ("top-k", TP2), ("top-k", EP2), *(pytest.param(name, parallel, marks=pytest.mark.slow) for name, parallel in [
        ("by batch", FOLDED), ("by batch", BY_CHANNEL), ("by batch", OVER_PARTS), ("deepseek-v3", EP2),
        ("switch", PARTS_OF_ROWS),
    ])
])  # fmt: skip
def test_without_a_fault_nothing_is_found(workers: Workers, name: str, parallel: ParallelConfig) -> None:
    assert workers.run(wrong, 2, None, name, parallel, timeout=120.0) == [set(), set()]


def send_gradients_as_many_as_tokens(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return collectives.all_to_all_no_grad(gradient, ctx.sent, ctx.received, ctx.group), None, None, None

    patch.setattr(collectives._AllToAll, "backward", staticmethod(backward))


def forget_shared_ones(patch: Patch) -> None:
    def share(self: MoE, outputs: list[Tensor], x: Tensor, sequence: Any) -> None:
        assert self.shared is not None
        outputs.append(self.shared(x, sequence).detach())

    patch.setattr(MoE, "_add_shared_experts", share)


@pytest.mark.parametrize(("fault", "name", "message"), [
    (send_gradients_as_many_as_tokens, "top-k", "Split sizes doesn't match total dim 0 size"),
    pytest.param(forget_shared_ones, "deepseek-v3", r"no loss depends on decoder\.layers\.1\.ffn\.shared",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_a_fault_is_loud(workers: Workers, fault: Fault, name: str, message: str) -> None:
    with pytest.raises(WorkerFailure, match=message):
        workers.run(wrong, 2, fault.__name__, name, EP2, timeout=120.0)


def measure_all_together(patch: Patch) -> None:
    """Muon's matrices are made smaller by the norm of the whole stack."""
    real = Tensor.norm

    def norm(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if options.get("dim") == (1, 2):
            return real(self).expand(len(self), 1, 1)
        return real(self, *args, **options)

    patch.setattr(matrix_optimizers.Tensor, "norm", norm)


def turn_all_alike(patch: Patch) -> None:
    """SOAP's matrices have the mean covariance of the stack."""
    real = Soap._update_covariances

    def measure(self: Soap, weight: Tensor, group: dict[str, Any], sides: list[str]) -> None:
        real(self, weight, group, sides)
        for side in sides if weight.dim() > 2 else ():
            state = self.state[weight]
            state[side] = state[side].mean(0, keepdim=True).expand_as(state[side]).clone()

    patch.setattr(Soap, "_update_covariances", measure)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), [("muon", measure_all_together), ("soap", turn_all_alike)])
def test_matrices_of_a_stack_that_are_taken_together_are_found(
    monkeypatch: Patch, name: str, fault: Callable[[Patch], None]
) -> None:
    check_stack_moves_as_matrices(name)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_stack_moves_as_matrices(name)
