"""Every model family cut into pipeline stages: the gradients of one device, with dropout on, under every schedule.

One call of the workers compares several models, so that a layout costs one set of process groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatfm import checkpoint
from megatfm.checkpoint import ShardedTensor
from megatfm.config import ModelConfig, OptimizerSection, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.pipeline import PipelineForwardBackward, StepState
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.parallel.pipeline_stages import split_into_stages
from megatfm.verify.traffic import TrafficCounter
from tests.support.batches import CAUSAL, PassThroughObjective, family_case, global_batch
from tests.support.layouts import EXTENDED, PIPELINE_SCHEDULES, SLOW, make_cases
from tests.support.models import ADAMW, FAMILY_MODELS, LENGTH, MUON, PREFIX_LM, ROWS, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    ROW_LENGTHS,
    build_engine,
    local_block,
    model_gradient_errors,
    one_device,
    one_device_gradients,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

FAMILIES = ("llama", "gpt", "bert", "t5", "electra", PREFIX_LM)
OTHERS = (
    "xlnet", "albert", "deberta", "deberta v3", "latent attention", "shaw, deepnorm", "alibi, sandwich norm", "swin",
    "mvit v2", "swin v2",
)  # fmt: skip
LONGER = ("gpipe", "interleaved", "interleaved-zero-bubble", "dualpipev")
"""Schedules whose cases on four ranks are extended: two ranks run each of them."""


@dataclass(frozen=True)
class Reference:
    """One device: batch, model with its gradients, objective, the loss in training and in evaluation."""

    config: ModelConfig
    batch: dict[str, Tensor]
    model: nn.Module
    objective: PassThroughObjective
    loss: float
    evaluated: float


@cache
def compute_reference(name: str, deep: bool) -> Reference:
    """Compute the reference of a family, once in a process for all schedules and layouts."""
    config, batch = family_case(name, deep)
    model, objective, loss = one_device_reference(config, batch)
    with torch.no_grad():
        terms = objective(model.eval(), batch)
    counts = objective.target_counts(batch)
    evaluated = sum(objective.loss_weights[term] * float(terms[term]) / int(counts[term]) for term in terms)
    return Reference(config, batch, model, objective, loss, evaluated)


def compare(names: Sequence[str], parallel: ParallelConfig, recomputed: str = "none") -> list[set[str]]:
    """Initial weights, loss, gradients, their norm and the evaluated loss; returns the parameters that are here."""
    names_by_model = []
    for name in names:
        reference = compute_reference(name, parallel.pp * parallel.stages_per_rank > 4)
        model, objective = reference.model, reference.objective
        engine = build_engine(reference.config, parallel, recomputed=recomputed)
        for n, parameter in model.named_parameters():
            if n in engine.local:
                assert torch.equal(local_block(engine, n, parameter.detach()), engine.local[n]), (
                    f"{name}: {n} starts otherwise"
                )
        batches = uneven_microbatches(engine, reference.batch)
        for _ in range(2):  # the second step finds nothing left of the first
            stats = engine.forward_backward(batches, objective)
            assert stats.loss == pytest.approx(reference.loss, rel=1e-12), name
            assert model_gradient_errors(engine, model) == {}, name
            norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
            assert engine.step(0.0, clip=0.0) == pytest.approx(float(norm), rel=1e-12), name
        assert engine.evaluate(batches, objective).loss == pytest.approx(reference.evaluated, rel=1e-12), name
        names_by_model.append(set(engine.local))
    return names_by_model


def check(workers: Workers, ranks: int, names: Sequence[str], parallel: ParallelConfig) -> None:
    names_by_rank = workers.run(compare, ranks, names, parallel, timeout=180.0)
    for i, name in enumerate(names):
        config, _ = family_case(name, parallel.pp * parallel.stages_per_rank > 4)
        with torch.device("meta"):
            model = build(config)
        everything = {n for n, _ in model.named_parameters()}
        assert set().union(*(rank[i] for rank in names_by_rank)) == everything
        assert min(len(rank[i]) for rank in names_by_rank) < len(everything)


@pytest.mark.parametrize(("schedule", "names"), make_cases(dict.fromkeys(PIPELINE_SCHEDULES, FAMILIES)))
def test_schedules_on_two_ranks_equal_one_device(workers: Workers, schedule: str, names: list[str]) -> None:
    check(workers, 2, names, ParallelConfig(pp=2, pp_schedule=schedule))


@pytest.mark.parametrize(
    ("schedule", "names"), make_cases(dict.fromkeys(PIPELINE_SCHEDULES, FAMILIES), extended=LONGER)
)
def test_schedules_on_four_ranks_equal_one_device(workers: Workers, schedule: str, names: list[str]) -> None:
    check(workers, 4, names, ParallelConfig(pp=4, pp_schedule=schedule))


@pytest.mark.parametrize(("schedule", "names"), make_cases(dict.fromkeys(PIPELINE_SCHEDULES, OTHERS)))
def test_other_families_on_two_ranks(workers: Workers, schedule: str, names: list[str]) -> None:
    check(workers, 2, names, ParallelConfig(pp=2, pp_schedule=schedule))


AXES = {
    "tp2 × pp2": (4, ParallelConfig(pp=2, tp=2)),
    "pp2 × zero3": (4, ParallelConfig(pp=2, dp_shard=2)),
    "tp2 × pp2 × zero3": (8, ParallelConfig(pp=2, tp=2, dp_shard=2)),
}
ON_FOUR = [layout for layout, (ranks, _) in AXES.items() if ranks == 4]


@pytest.mark.parametrize(("layout", "names"), [
    *make_cases(dict.fromkeys(ON_FOUR, FAMILIES)),
    pytest.param("tp2 × pp2 × zero3", ["bert"], marks=EXTENDED),
    pytest.param("tp2 × pp2 × zero3", [name for name in FAMILIES if name != "bert"], marks=SLOW),
])  # fmt: skip
def test_with_other_axes(workers: Workers, layout: str, names: list[str]) -> None:
    ranks, parallel = AXES[layout]
    check(workers, ranks, names, parallel)


MIXED = {
    "zbv × tp2": (4, ParallelConfig(pp=2, pp_schedule="zbv", tp=2)),
    "1f1b × tp2 without sequence parallel": (4, ParallelConfig(pp=2, tp=2, sequence_parallel=False)),
    "zbv × zero3": (4, ParallelConfig(pp=2, pp_schedule="zbv", dp_shard=2)),
    "interleaved × zero2": (4, ParallelConfig(pp=2, pp_schedule="interleaved", dp_shard=2, zero=2)),
    "1f1b × zero1": (4, ParallelConfig(pp=2, dp_shard=2, zero=1)),
    "zbv × replicas": (4, ParallelConfig(pp=2, pp_schedule="zbv", dp_shard=2, zero=0)),
    "three stages a rank": (2, ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=3)),
}
LONGER_MIXED = ("1f1b × tp2 without sequence parallel", "zbv × zero3", "1f1b × zero1")


@pytest.mark.parametrize(
    ("layout", "names"), make_cases(dict.fromkeys(MIXED, ("t5", "electra", "xlnet")), extended=LONGER_MIXED)
)
def test_schedules_with_other_axes(workers: Workers, layout: str, names: list[str]) -> None:
    ranks, parallel = MIXED[layout]
    check(workers, ranks, names, parallel)


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_blocks_that_are_recomputed(workers: Workers, recomputed: str) -> None:
    workers.run(compare, 2, ["t5", "electra"], ParallelConfig(pp=2), recomputed)


def train(parallel: ParallelConfig, optimizer: OptimizerSection) -> float:
    """Largest difference of a weight from the same optimizer on one device's gradients."""
    model = one_device(TIED_MODEL)
    named = dict(model.named_parameters())
    engine = build_engine(TIED_MODEL, parallel, optimizer)
    matrices = [n for n, p in named.items() if p.dim() == 2 and optimizer.name == "muon" and "layers" in n]
    groups = [
        {"params": [p for n, p in named.items() if p.dim() == 2 and n not in matrices]},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    plain: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=ADAMW.eps, weight_decay=0.1)
    ]
    if matrices:
        plain.append(torch.optim.Muon([named[n] for n in matrices], lr=0.02, momentum=0.95, weight_decay=0.1))
    assert ADAMW.betas == (0.9, 0.95)
    for step in range(5):
        batch = global_batch(seed=step)
        one_device_gradients(model, batch)
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), optimizer.max_grad_norm)
        for one in plain:
            one.step()
        engine.forward_backward(uneven_microbatches(engine, batch), CAUSAL)
        assert engine.step(optimizer.lr, optimizer.max_grad_norm) == pytest.approx(float(norm), rel=1e-6)
    return max(float((local_block(engine, n, named[n].detach()) - t).abs().max()) for n, t in engine.local.items())


STEPS = {
    "1f1b": (2, ParallelConfig(pp=2), ADAMW),
    "zbv": (2, ParallelConfig(pp=2, pp_schedule="zbv"), ADAMW),
    "tp2 × pp2": (4, ParallelConfig(pp=2, tp=2), ADAMW),
    "pp2 × zero3": (4, ParallelConfig(pp=2, dp_shard=2), ADAMW),
    "muon, pp2 × zero3": (4, ParallelConfig(pp=2, dp_shard=2), MUON),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=EXTENDED if layout in ("tp2 × pp2", "muon, pp2 × zero3") else ()) for layout in STEPS],
)
def test_steps_equal_plain_torch(workers: Workers, layout: str) -> None:
    ranks, parallel, optimizer = STEPS[layout]
    assert max(workers.run(train, ranks, parallel, optimizer)) <= 1e-7


def reshard(folder: Path, written: ParallelConfig, between: ParallelConfig) -> int:
    """A checkpoint of one layout, through another, and back: the same bits."""

    def engine(parallel: ParallelConfig) -> NativeEngine:
        if parallel.pp > 1:
            return build_engine(TIED_MODEL, parallel)
        return build_engine(TIED_MODEL, parallel, ADAMW)

    def carried_over(a: NativeEngine, step: int, parallel: ParallelConfig) -> NativeEngine:
        path = checkpoint.save(folder, step, a.state_dict(), {}, keep=3)
        b = engine(parallel)
        stored = b.empty_state_dict(checkpoint.read_tensor_specs(path))
        checkpoint.load(path, stored)
        b.load_state_dict(stored)
        return b

    first = engine(written)
    batch = global_batch(seed=1)
    for _ in range(2):
        first.forward_backward(uneven_microbatches(first, batch), CAUSAL)
        first.step(1e-2, 0.3)
    last = carried_over(carried_over(first, 1, between), 2, written)
    before, after = first.state_dict(), last.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        b = after[name]
        if isinstance(value, ShardedTensor):
            assert isinstance(b, ShardedTensor)
            value, b = value.tensor, b.tensor
        assert torch.equal(value, b), name
    return len(before)


def test_checkpoints_pass_between_layouts(workers: Workers, tmp_path: Path) -> None:
    written, between = ParallelConfig(pp=2, pp_schedule="zbv"), ParallelConfig(dp_shard=2)
    assert sum(workers.run(reshard, 2, tmp_path, written, between)) > 70  # weights and two moments


def count_traffic(parallel: ParallelConfig) -> dict[str, int]:
    """Bytes sent between pipeline ranks in a step."""
    engine = build_engine(UNTIED_MODEL, parallel)
    batch = global_batch(seed=3)
    with TrafficCounter(engine.process_groups()) as traffic:
        engine.forward_backward(uneven_microbatches(engine, batch), CAUSAL)
    return {flow.collective: flow.sent_bytes for flow in traffic.list_traffic() if flow.axis == "pp"}


@pytest.mark.parametrize(("parallel", "boundaries"), [
    (ParallelConfig(pp=2), 1),
    (ParallelConfig(pp=2, pp_schedule="interleaved"), 3),
    (ParallelConfig(pp=2, pp_schedule="zbv"), 2),
], ids=["1f1b", "interleaved", "zbv"])  # fmt: skip
def test_traffic_is_the_hidden_vectors(workers: Workers, parallel: ParallelConfig, boundaries: int) -> None:
    """b·s·h elements of each boundary between stages of two ranks, in each direction; the loss is one number more."""
    results = workers.run(count_traffic, 2, parallel)
    assert sum(rank["send"] for rank in results) == 2 * boundaries * ROWS * LENGTH * UNTIED_MODEL.d_model * 8
    assert [rank["all_reduce"] for rank in results] == [8, 8]


def most_in_flight(parallel: ParallelConfig) -> int:
    engine, most = build_engine(UNTIED_MODEL, parallel), [0]
    real = PipelineForwardBackward._run_forward

    def run_forward(self: PipelineForwardBackward, step: StepState, *args: object) -> None:
        real(self, step, *args)  # type: ignore[arg-type]
        most.append(len(step.microbatches) + len(step.inputs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineForwardBackward, "_run_forward", run_forward)
        engine.forward_backward(uneven_microbatches(engine, global_batch(seed=3)), CAUSAL)
    return max(most)


def test_1f1b_holds_few_micro_batches(workers: Workers) -> None:
    assert workers.run(most_in_flight, 2, ParallelConfig(pp=2, pp_schedule="gpipe")) == [5, 5]
    in_flight = workers.run(most_in_flight, 2, ParallelConfig(pp=2))
    assert in_flight[0] == 2
    assert in_flight[1] <= 2  # one, and perhaps one that has just arrived


def refuse(name: str, parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_engine(FAMILY_MODELS[name], parallel)


@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv", "dualpipev"])
def test_a_split_backward_pass_is_not_recomputed_selectively(workers: Workers, schedule: str) -> None:
    """Refused by the engine too, for a program that makes one without a config."""
    workers.run(refuse_recomputation, 2, ParallelConfig(pp=2, pp_schedule=schedule))


def refuse_recomputation(parallel: ParallelConfig) -> None:
    refused = rf"pp_schedule = '{parallel.pp_schedule}' takes .* train\.recompute = 'selective' would repeat"
    with pytest.raises(UsageError, match=refused):
        build_engine(UNTIED_MODEL, parallel, recomputed="selective")
    build_engine(UNTIED_MODEL, parallel, recomputed="full")


def test_a_model_that_cannot_be_split_is_refused_in_a_line(workers: Workers) -> None:
    with pytest.raises(UsageError, match=r"parallel\.pp = 2: .* no `split_points` for pipeline stages: set"):
        split_into_stages(nn.Linear(2, 2), "1f1b", 2, 1, lengths=ROW_LENGTHS)
    many = ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=5)
    workers.run(
        refuse, 2, "llama", many,
        r"10 pipeline stages .* can be cut into 4 at most: choose parallel\.virtual_stages = 2",
    )  # fmt: skip
    wrong = ParallelConfig(pp=2, pp_split_points=["decoder.layers.9"])
    workers.run(
        refuse, 2, "llama", wrong,
        r"parallel\.pp_split_points: no split point is called 'decoder\.layers\.9' after the first",
    )  # fmt: skip
    early = ParallelConfig(pp=2, pp_split_points=["decoder.layers.1", "head"])
    workers.run(refuse, 2, "llama", early, r"2 stages need 1 different names in the model's order")


def list_local_parameters(parallel: ParallelConfig) -> set[str]:
    return set(build_engine(UNTIED_MODEL, parallel).local)


def test_cuts_that_are_asked_for(workers: Workers) -> None:
    first, second = workers.run(list_local_parameters, 2, ParallelConfig(pp=2, pp_split_points=["decoder.layers.1"]))
    assert first & second == set()
    assert {n for n in first if "layers.1" in n} == set()
    assert "head.weight" in second


def change_lengths(parallel: ParallelConfig) -> None:
    engine, model = build_engine(UNTIED_MODEL, parallel), one_device(UNTIED_MODEL)
    batch = global_batch(seed=3)
    for widths in ((12, 12, 12, 12), (7, 7, 7, 7), (5, 12, 8)):
        batches = [{key: value[2 * i : 2 * i + 2, :w] for key, value in batch.items()} for i, w in enumerate(widths)]
        count = sum(int((microbatch["targets"] != -100).sum()) for microbatch in batches)
        model.zero_grad()
        losses = [model(**microbatch).losses["causal"] / count for microbatch in batches]
        torch.stack(losses).sum().backward()
        stats = engine.forward_backward(batches, CAUSAL)
        assert stats.loss == pytest.approx(float(torch.stack(losses).sum().detach()), rel=1e-12)
        assert model_gradient_errors(engine, model) == {}
        engine.zero_grad()


def test_lengths_may_change_between_and_within_steps(workers: Workers) -> None:
    """And the number of micro-batches, here to one that a schedule of two stages a rank is not made for."""
    workers.run(change_lengths, 2, ParallelConfig(pp=2))
    workers.run(change_lengths, 2, ParallelConfig(pp=2, pp_schedule="interleaved-zero-bubble"))


def half_precision(precision: str, parallel: ParallelConfig) -> tuple[float, ...]:
    engine = build_engine(TIED_MODEL, parallel, precision=precision)
    batch = global_batch(seed=3)
    actual = []
    for _ in range(3):
        actual.append(engine.forward_backward(uneven_microbatches(engine, batch), CAUSAL).loss)
        actual.append(engine.step(1e-2, 1.0))
    return tuple(actual)


def test_half_precision_is_near_to_double(workers: Workers) -> None:
    """Three steps, whose losses and norms both ranks know; the tie is summed in the stored precision."""
    exact, _ = workers.run(half_precision, 2, "fp64", ParallelConfig(pp=2))
    for precision in ("bf16", "fp16"):
        near, second = workers.run(half_precision, 2, precision, ParallelConfig(pp=2, pp_schedule="zbv"))
        assert near == second
        assert near == pytest.approx(exact, rel=2e-2), precision
        assert near != pytest.approx(exact, rel=1e-9), precision
