"""Faults where ranks share experts: the comparison with one device must find each of them.

Further ways to share them, which are slow, are in `test_planted_expert_faults.py`.
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
from megatfm.parallel import collectives
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.mesh import Mesh
from tests.support.batches import family_batch
from tests.support.expert_parity import (
    EP2,
    EXPERT_MATRICES,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    TP2,
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
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def count_one_rank_s_choices(patch: Patch) -> None:
    """The shares that the next step is balanced by are those of one rank alone."""
    patch.setattr(Mesh, "all_reduce_", lambda self, tensor, axes: None, raising=True)


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


ROUTER_AND_BELOW = {"*", "-*.layers.1.ffn.experts.*", "-decoder.norm.*"}
"""Parameters whose gradients come by way of the last router's choices or weights."""
EXPERTS_AND_BELOW = {"*", "-*.layers.1.ffn.router.*", "-decoder.norm.*"}


FAULTS: dict[Callable[[Patch], None], tuple[ParallelConfig, set[str]]] = {
    count_one_rank_s_choices: (ParallelConfig(dp_shard=2, zero=3), ROUTER_AND_BELOW),
    balance_parts_as_if_they_were_rows: (TP2, ROUTER_AND_BELOW),
    give_each_rank_the_first_experts: (TP2, EVERYTHING),
    forget_the_weights_other_shares: (TP2, ROUTER_AND_BELOW),
    leave_rows_in_the_order_of_experts: (EP2, EVERYTHING),
    bring_gradients_back_in_another_order: (EP2, EXPERTS_AND_BELOW),
}
"""Fault → the layout that shows it, and parameters whose gradients must be found wrong, and no others."""


OF_EXPERTS_ALONE: dict[Callable[[Patch], None], ParallelConfig] = {
    take_experts_for_everybody_s: ParallelConfig(dp_shard=2, ep=2, zero=0),
    average_over_the_ranks_of_experts: EP2,
}


@cache
def reference(name: str) -> tuple[nn.Module, Any, list[float]]:
    """Two steps of one device: computed once in a process for all faults."""
    return two_steps_on_one_device(EXPERT_MODELS[name], family_batch(EXPERT_MODELS[name]))


def wrong(fault: str | None, parallel: ParallelConfig, name: str = "top-k") -> set[str]:
    model, objective, _ = reference(name)
    with pytest.MonkeyPatch.context() as patch:
        if fault == count_one_rank_s_choices.__name__:
            patch.setattr(base.ModuleState, "update", count_on_one_rank(base.ModuleState.update))
        elif fault:
            globals()[fault](patch)
        engine, _ = second_step(EXPERT_MODELS[name], parallel, objective)
        return set(model_gradient_errors(engine, model))


def count_on_one_rank(update: Any) -> Any:
    def alone(self: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            count_one_rank_s_choices(patch)
            update(self)

    return alone


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    layout, patterns = FAULTS[fault]
    actual = set[str]().union(*workers.run(wrong, 2, fault.__name__, layout, timeout=120.0))
    model, *_ = reference("top-k")
    assert actual == list_expected_errors(model, patterns)


@pytest.mark.parametrize("fault", OF_EXPERTS_ALONE, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_experts_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    results = workers.run(wrong, 2, fault.__name__, OF_EXPERTS_ALONE[fault], timeout=120.0)
    assert set[str]().union(*results) == EXPERT_MATRICES


def send_gradients_as_many_as_tokens(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return collectives.all_to_all_no_grad(gradient, ctx.sent, ctx.received, ctx.group), None, None, None

    patch.setattr(collectives._AllToAll, "backward", staticmethod(backward))


def test_swapped_numbers_of_rows_are_loud(workers: Workers) -> None:
    with pytest.raises(Exception, match="Split sizes doesn't match total dim 0 size"):
        workers.run(wrong, 2, send_gradients_as_many_as_tokens.__name__, EP2, timeout=120.0)


def add_the_last_bias_everywhere(patch: Patch) -> None:
    patch.setattr(Experts, "down_bias_scale", property(lambda self: 1.0, lambda self, share: None), raising=False)


def limit_each_part_of_a_row(patch: Patch) -> None:
    """A capacity is filled by a rank's own tokens alone."""
    patch.setattr(TensorParallelGroup, "gather_replicated", lambda self, x: torch.cat([x, x], 1))


OF_OTHER_WAYS: dict[Callable[[Patch], None], tuple[str, str, set[str]]] = {
    add_the_last_bias_everywhere: ("deepseek-v3", "tp2 by channels", {"*.experts.b_down"}),
    limit_each_part_of_a_row: ("switch", "ep2 of tp2", EVERYTHING),
}


@pytest.mark.parametrize("fault", OF_OTHER_WAYS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_other_ways_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    name, layout, patterns = OF_OTHER_WAYS[fault]
    results = workers.run(wrong, 2, fault.__name__, EXPERT_TP_LAYOUTS[2][layout], name, timeout=120.0)
    model, *_ = reference(name)
    assert set[str]().union(*results) == list_expected_errors(model, patterns)


def test_without_a_fault_nothing_is_found(workers: Workers) -> None:
    for layout in (TP2, EP2):
        assert workers.run(wrong, 2, None, layout, timeout=120.0) == [set(), set()]
