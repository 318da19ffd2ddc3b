"""The comparison of frozen weights and of heads finds what it is there to find: each fault planted here turns it red.

What is sent of frozen weights is held in tests/unit/verify/test_verify.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ParallelConfig
from megatfm.engines.interface import ParallelizedModel
from megatfm.engines.losses import LossAccumulator, TermWeights
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.models import build
from megatfm.parallel import styles
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.styles import Layouts
from tests.support.frozen_parity import FREEZE, frozen_errors
from tests.support.models import FAMILY_MODELS
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch

NAME = "bert"
"""The model: it has heads for sentences and for span boundaries."""


def marks_are_lost(patch: Patch) -> None:
    """Let the engine unfreeze all parameters."""
    real = NativeEngine.__init__

    def init(self: NativeEngine, parallelized: ParallelizedModel, *args: Any, **options: Any) -> None:
        parallelized.model.requires_grad_(True)
        real(self, parallelized, *args, **options)

    patch.setattr(NativeEngine, "__init__", init)


def frozen_weights_creep(patch: Patch) -> None:
    real = NativeEngine.step

    def step(self: NativeEngine, lr: float, clip: float, **how: Any) -> float:
        norm = real(self, lr, clip, **how)
        with torch.no_grad():
            for name, box in self.weights().items():
                if name in self.layout and not self.model.get_parameter(name).requires_grad:
                    box.tensor.add_(1e-9)
        return norm

    patch.setattr(NativeEngine, "step", step)


def a_head_s_term_is_summed_over_copies(patch: Patch) -> None:
    """Ranks that compute a head alike each have all of its loss."""
    real = styles.GATHER_INPUT_REPLICATED.apply
    assert real is not None

    def install(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
        real(module, ranks, layouts)
        module.register_forward_hook(lambda _, __, output: output * ranks.group.size())

    patch.setitem(
        styles.STYLES._parts,
        styles.GATHER_INPUT_REPLICATED.name,
        replace(styles.GATHER_INPUT_REPLICATED, apply=install),
    )


def the_last_stage_forgets_a_head(patch: Patch) -> None:
    real = PipelineForwardBackward._run_stage

    def call(self: PipelineForwardBackward, *args: Any) -> Any:
        gives, terms = real(self, *args)
        return gives, {name: term * (name != "sentence") for name, term in terms.items()}

    patch.setattr(PipelineForwardBackward, "_run_stage", call)


def a_head_s_targets_are_counted_here_only(patch: Patch) -> None:
    real = LossAccumulator.count

    def count(self: LossAccumulator, batches: Any) -> None:
        real(self, batches)
        tensors = [{name: torch.as_tensor(values) for name, values in batch.items()} for batch in batches]
        local = sum(int(self._objective.target_counts(batch)["boundary"]) for batch in tensors)
        self._counts[self._term_index["boundary"]] = local

    patch.setattr(LossAccumulator, "count", count)


def a_head_s_term_weighs_twice(patch: Patch) -> None:
    real = TermWeights.__call__

    def weigh(self: TermWeights, terms: Mapping[str, Tensor]) -> Tensor:
        return real(self, {name: term * (1 + (name == "boundary")) for name, term in terms.items()})

    patch.setattr(TermWeights, "__call__", weigh)


STILL = {
    marks_are_lost: ("gradient", ParallelConfig(dp_shard=2, zero=1)),
    frozen_weights_creep: ("weight", ParallelConfig(dp_shard=2)),
}
"""Fault → in what each frozen weight must be found wrong, and the layout."""

HEADS: dict[Callable[[Patch], None], ParallelConfig] = {
    a_head_s_term_is_summed_over_copies: ParallelConfig(tp=2),
    the_last_stage_forgets_a_head: ParallelConfig(pp=2),
    a_head_s_targets_are_counted_here_only: ParallelConfig(dp_shard=2),
    a_head_s_term_weighs_twice: ParallelConfig(dp_shard=2, zero=0),
}
"""Fault → the layout that shows it."""


def find(fault: str | None, parallel: ParallelConfig) -> set[str]:
    return frozen_errors(NAME, parallel, fault=globals()[fault] if fault else None)[0]


def names() -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in build(FAMILY_MODELS[NAME]).named_parameters()]


@pytest.mark.parametrize("fault", STILL, ids=lambda fault: fault.__name__)
def test_a_frozen_weight_that_is_not_left_alone_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    kind, parallel = STILL[fault]
    actual = set().union(*workers.run(find, 2, fault.__name__, parallel))
    frozen = {name for name in names() if any(fnmatchcase(name, pattern) for pattern in FREEZE[NAME])}
    output = {name for name in names() if f"{kind} {name}" in actual}
    assert frozen == output & frozen


@pytest.mark.parametrize("fault", HEADS, ids=lambda fault: fault.__name__)
def test_a_head_s_term_that_is_dropped_or_doubled_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    """Clipping by the norm carries it to all that is trained."""
    actual = set().union(*workers.run(find, 2, fault.__name__, HEADS[fault]))
    trained = [name for name in names() if not any(fnmatchcase(name, pattern) for pattern in FREEZE[NAME])]
    assert actual == {"loss", "norm", *(f"{kind} {name}" for kind in ("gradient", "weight") for name in trained)}


def test_without_a_fault_nothing_is_found(workers: Workers) -> None:
    """In the same processes, so that no fault has stayed behind."""
    layouts = {str(parallel): parallel for parallel in (*(parallel for _, parallel in STILL.values()), *HEADS.values())}
    for parallel in layouts.values():
        assert workers.run(find, 2, None, parallel) == [set(), set()]
