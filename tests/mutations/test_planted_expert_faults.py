"""Faults planted where ranks share experts in other ways: folded over tensor-parallel ranks or parts of rows, cut by
channels, beside shared experts, and moved in stacks. Each must turn the comparison with one device red."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.layers.moe.moe import MoE
from megatfm.optim import matrix_optimizers
from megatfm.optim.matrix_optimizers import Soap
from megatfm.parallel import collectives, cp_plans
from megatfm.parallel.collectives import TensorParallelGroup
from tests.support.batches import family_batch
from tests.support.expert_parity import (
    EP2,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    objective_for,
    second_step,
    two_steps_on_one_device,
)
from tests.support.faults import (
    EVERYTHING,
    bring_gradients_back_in_another_order,
    forget_the_weights_other_shares,
    leave_rows_in_the_order_of_experts,
    list_expected_errors,
    take_experts_for_everybody_s,
)
from tests.support.parity import model_gradient_errors
from tests.support.sharded_engines import check_stack_moves_as_matrices
from tests.support.workers import Workers

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
BELOW_ROUTER = {"*", "-*.layers.1.ffn.experts.*", "-decoder.norm.*"}
BELOW_EXPERTS = {"*", "-*.layers.1.ffn.router.*", "-decoder.norm.*"}
BELOW_MOE = {"decoder.*", "-*.layers.1.ffn.*", "-decoder.norm.*"}
"""Parameters whose gradients come by way of the last router's weights, of its experts, of the layer's input."""


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


def forget_shared_ones(patch: Patch) -> None:
    def share(self: MoE, outputs: list[Tensor], x: Tensor, sequence: Any) -> None:
        assert self.shared is not None
        outputs.append(self.shared(x, sequence).detach())

    patch.setattr(MoE, "_add_shared_experts", share)


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


OVER_PARTS = ParallelConfig(dp_shard=1, cp=2, ep=2, zero=0)
CASES: dict[str, tuple[str, ParallelConfig, dict[Callable[[Patch], None], set[str]]]] = {
    "folded": ("by batch", EXPERT_TP_LAYOUTS[2]["ep2 of tp2"],
               {leave_rows_in_the_order_of_experts: EVERYTHING, bring_gradients_back_in_another_order: BELOW_EXPERTS}),
    "by_channel": ("by batch", EXPERT_TP_LAYOUTS[2]["tp2 by channels"],
                   {forget_the_weights_other_shares: BELOW_ROUTER, forget_the_other_channels_gradient: EVERYTHING}),
    "parts of rows": (
        "by batch", OVER_PARTS,
        {take_experts_for_everybody_s: {"*.ffn.experts.*"}, leave_rows_in_the_order_of_experts: EVERYTHING,
         bring_gradients_back_in_another_order: BELOW_EXPERTS},
    ),
    "beside shared ones": (
        "deepseek-v3", EP2,
        {read_gradients_before_they_come: BELOW_MOE, forget_what_is_below_shared_ones: BELOW_MOE,
         count_shared_ones_twice: {"decoder.*", "-*.ffn.experts.*", "-*.ffn.router.*", "-decoder.norm.*"}},
    ),
    "parts of limited rows": ("switch", ParallelConfig(dp_shard=1, cp=2),
                              {limit_parts_of_rows: EVERYTHING, leave_parts_in_the_order_of_ranks: EVERYTHING}),
}  # fmt: skip
"""Case → model, layout, and fault → parameters whose gradients must be found wrong, and no others."""


def wrong(case: str) -> dict[str, set[str]]:
    """Gradients that differ, by fault; "" for none."""
    name, parallel, faults = CASES[case]
    model, objective, _ = two_steps_on_one_device(EXPERT_MODELS[name], family_batch(EXPERT_MODELS[name]))
    actual = {}
    for fault in (lambda patch: None, *faults):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            engine, _ = second_step(EXPERT_MODELS[name], parallel, objective)
            actual[getattr(fault, "__name__", "")] = set(model_gradient_errors(engine, model))
    actual[""] = actual.pop("<lambda>")
    return actual


@pytest.mark.parametrize("case", CASES)
def test_a_planted_fault_is_found(workers: Workers, case: str) -> None:
    of_ranks = workers.run(wrong, 2, case, timeout=200.0)
    assert all(not faults_by_name[""] for faults_by_name in of_ranks)
    name, _, faults = CASES[case]
    model, *_ = two_steps_on_one_device(EXPERT_MODELS[name], family_batch(EXPERT_MODELS[name]))
    for fault, patterns in faults.items():
        names = set[str]().union(*(faults_by_name[fault.__name__] for faults_by_name in of_ranks))
        assert names == list_expected_errors(model, patterns), fault.__name__


def without_shared_ones() -> None:
    model = EXPERT_MODELS["deepseek-v3"]
    with pytest.MonkeyPatch.context() as patch:
        forget_shared_ones(patch)
        second_step(model, EP2, objective_for(model, family_batch(model)))


def test_shared_experts_that_get_no_gradient_are_loud(workers: Workers) -> None:
    with pytest.raises(Exception, match=r"no loss depends on decoder\.layers\.1\.ffn\.shared"):
        workers.run(without_shared_ones, 2, timeout=120.0)


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


@pytest.mark.parametrize(("name", "fault"), [("muon", measure_all_together), ("soap", turn_all_alike)])
def test_matrices_of_a_stack_that_are_taken_together_are_found(
    monkeypatch: Patch, name: str, fault: Callable[[Patch], None]
) -> None:
    check_stack_moves_as_matrices(name)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_stack_moves_as_matrices(name)
