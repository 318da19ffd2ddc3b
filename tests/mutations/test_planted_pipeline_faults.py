"""The comparison of pipelines finds what it is there to find: each fault planted here must turn it red."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.engines import base, passes
from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.engines.state import TiedParameters
from megatfm.models import build
from tests.support.batches import family_case
from tests.support.parity import (
    build_engine,
    local_block,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import WorkerFailure, Workers

Patch = pytest.MonkeyPatch

TWO = ParallelConfig(pp=2)
FOUR = ParallelConfig(pp=4)
ZBV = ParallelConfig(
    pp=2, pp_schedule="zbv",
    pp_split_points=["generator.encoder.layers.1", "discriminator.encoder.layers.0",
                     "discriminator.encoder.layers.1"],
)  # fmt: skip


def sum_no_tie(patch: Patch) -> None:
    patch.setattr(TiedParameters, "all_reduce_gradients", lambda self, gradients: None)


def count_ties_on_each_rank(patch: Patch) -> None:
    patch.setattr(TiedParameters, "is_owner", lambda self, name: True)


def name_layers_from_each_stage_on(patch: Patch) -> None:
    """Number the layers of every stage from 0."""
    real = base.draw

    def draw(initial: Any, seed: int, name: str, *box: Any) -> Tensor:
        return real(initial, seed, name.replace("layers.1", "layers.0") if dist.get_rank() else name, *box)

    patch.setattr(base, "draw", draw)


def take_the_next_micro_batch(patch: Patch) -> None:
    real = PipelineForwardBackward._run_stage

    def call(self: PipelineForwardBackward, stage: Any, batch: Any, *args: Any) -> Any:
        return real(self, stage, {n: t.roll(1, 0) for n, t in batch.items()} if stage.index else batch, *args)

    patch.setattr(PipelineForwardBackward, "_run_stage", call)


def lose_the_memory_s_gradient(patch: Patch) -> None:
    real = PipelineForwardBackward._send

    def send(self: PipelineForwardBackward, specs: Any, carry: dict[str, Tensor], to: int, group: Any) -> Any:
        backward = to < min(self._stages)
        inputs = {n: torch.zeros_like(t) if backward and n == "encoder_hidden" else t for n, t in carry.items()}
        return real(self, specs, inputs, to, group)

    patch.setattr(PipelineForwardBackward, "_send", send)


def lose_what_only_passes_through(patch: Patch) -> None:
    real = PipelineForwardBackward._queue_input_gradients

    def hand_back(self: PipelineForwardBackward, step: Any, stage: Any, i: int, passing: Any) -> None:
        passing.passthrough_gradients = {}
        real(self, step, stage, i, passing)

    patch.setattr(PipelineForwardBackward, "_queue_input_gradients", hand_back)


def take_the_last_loss_only(patch: Patch) -> None:
    real = PipelineForwardBackward._run_stage

    def call(self: PipelineForwardBackward, stage: Any, *args: Any) -> Any:
        gives, terms = real(self, stage, *args)
        return gives, terms if stage.index == len(self._pipeline.stages) - 1 else {}

    patch.setattr(PipelineForwardBackward, "_run_stage", call)


def forget_weights_off_the_way(patch: Patch) -> None:
    """Torch's own stages do the same."""
    real = passes._find_branch_nodes

    def branching(*args: Any) -> Any:
        return [(w, nodes) for w, nodes in real(*args) if passes.NOT_ON_INPUT_PATH not in nodes]

    patch.setattr(passes, "_find_branch_nodes", branching)


FAULTS: dict[Callable[[Patch], None], tuple[int, str, ParallelConfig, set[str]]] = {
    sum_no_tie: (2, "gpt", TWO, {"decoder.embedding.tokens.weight", "norm"}),
    count_ties_on_each_rank: (2, "gpt", TWO, {"norm"}),
    name_layers_from_each_stage_on: (  # norms start at 1 anywhere
        2,
        "llama",
        TWO,
        {"loss", "norm", "decoder.*", "head.*", "start of decoder.layers.1.[af]*.w*.weight"},
    ),
    take_the_next_micro_batch: (2, "llama", TWO, {"loss", "norm", "decoder.*", "head.*"}),
    lose_the_memory_s_gradient: (2, "t5", TWO, {"norm", "encoder.*"}),
    lose_what_only_passes_through: (4, "t5", FOUR, {"norm", "encoder.*"}),
}
"""Fault → ranks, the model and layout that show it, and all that must be found wrong."""


def find_wrong_gradients(fault: str | None, name: str, parallel: ParallelConfig) -> set[str]:
    """The comparison of tests/parity/test_pipelines.py, with a fault in the code."""
    config, batch = family_case(name, deep=False)
    model, objective, loss = one_device_reference(config, batch)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            globals()[fault](patch)
        engine = build_engine(config, parallel)
        named = dict(model.named_parameters())
        actual = {
            f"start of {n}"
            for n, t in engine.local.items()
            if not torch.equal(local_block(engine, n, named[n].detach()), t)
        }
        stats = engine.forward_backward(uneven_microbatches(engine, batch), objective)
        if stats.loss != pytest.approx(loss, rel=1e-12):
            actual.add("loss")
        actual |= set(model_gradient_errors(engine, model))
        norm = torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None]).norm()
        if float(engine.global_norm.compute(engine.gradients())) != pytest.approx(float(norm), rel=1e-9):
            actual.add("norm")
        return actual


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    ranks, name, parallel, patterns = FAULTS[fault]
    actual = set().union(*workers.run(find_wrong_gradients, ranks, fault.__name__, name, parallel))
    config, _ = family_case(name, deep=False)
    with torch.device("meta"):
        parameters = [n for n, _ in build(config).named_parameters()]
    everything = {"loss", "norm", *parameters, *(f"start of {n}" for n in parameters)}
    expected = {entry for entry in everything if any(fnmatchcase(entry, pattern) for pattern in patterns)}
    assert actual == expected


@pytest.mark.parametrize(("fault", "parallel", "weight"), [
    # The discriminator's shared tables have no gradient on the rank that has the generator's end, too.
    (forget_weights_off_the_way, ZBV, "discriminator.encoder.embedding.positions.weight"),
    (take_the_last_loss_only, TWO, "generator.encoder.embedding.norm.weight"),
])  # fmt: skip
def test_forgotten_weights_are_loud(
    workers: Workers, fault: Callable[[Patch], None], parallel: ParallelConfig, weight: str
) -> None:
    with pytest.raises(WorkerFailure, match=f"no loss depends on .*{re.escape(weight)}"):
        workers.run(find_wrong_gradients, 2, fault.__name__, "electra", parallel)


def test_without_a_fault_nothing_is_found(workers: Workers) -> None:
    """In the same processes, so that no fault has stayed behind."""
    for ranks, name, parallel in ((2, "electra", ZBV), (4, "t5", FOUR)):
        assert set().union(*workers.run(find_wrong_gradients, ranks, None, name, parallel)) == set()
