"""Pipeline schedules and stages: orders that run through, where a model is cut, what a rank keeps."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import fields
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from megatfm.config import ModelConfig, load_config
from megatfm.models import build
from megatfm.parallel.pipeline_schedule import (
    SPLITS_BACKWARD,
    V_SHAPED,
    Action,
    FakeStage,
    Schedule,
    add_send_recv,
    build_schedule,
    get_torch_pipeline_order,
    stage_to_rank,
)
from megatfm.parallel.pipeline_stages import Pipeline, compute_cost, prune_to_stages, split_into_stages
from tests.plugins import plugin
from tests.support.layouts import PASS_SECONDS, bubble_fraction, simulate_schedule

SMALL = {"vocab_size": 96, "d_model": 16, "n_layers": 6, "attention.n_heads": 2, "ffn.d_ff": 32}


@pytest.fixture
def make() -> Callable[..., nn.Module]:
    def make(**options: object) -> nn.Module:
        with torch.device("meta"):
            return build(ModelConfig.from_dotted({**SMALL, **options}))

    return make


def first_steps(pipeline: Pipeline) -> list[str]:
    return [stage.split_points[0].name for stage in pipeline.stages]


def test_costs_are_products_with_weights(make: Callable[..., nn.Module]) -> None:
    """Against a count by hand: a block's matrices, its attention over the row, and the head but not the lookup."""
    model = make(**{"embedding.tied": True})
    costs = {point.name: compute_cost(model, point, {"tokens": 10}) for point in model.split_points}
    matrices = 4 * 16 * 16 + 3 * 16 * 32
    assert costs["decoder.embedding"] == costs["decoder.norm"] == 0
    assert costs["decoder.layers.0"] == 10 * (matrices + 2 * 10 * 16)
    assert costs["head"] == 10 * 96 * 16


def test_a_large_vocabulary_is_a_separate_stage() -> None:
    model = load_config("gpt2-124m", []).model
    with torch.device("meta"):
        full = build(model)
    pipeline = split_into_stages(full, "1f1b", 4, 1, lengths={"tokens": 1024})
    assert first_steps(pipeline) == ["decoder.embedding", "decoder.layers.4", "decoder.layers.8", "head"]
    assert max(stage.cost for stage in pipeline.stages) < 1.15 * min(stage.cost for stage in pipeline.stages)


def test_cuts_weigh_each_block_by_its_own_kind(make: Callable[..., nn.Module]) -> None:
    """Eight times the width inside costs eight times; of a window the pairs that it sees count, by hand."""
    plugin("dilated")
    window = {"name": "dilated", "width": 2, "step": 1}
    kinds = {"layer_types": ["wide"] * 3 + ["near"] * 3, "layer_type.wide.ffn.d_ff": 256}
    kinds["layer_type.near.attention.pattern"] = window
    model = make(**kinds)
    costs = {point.name: compute_cost(model, point, {"tokens": 10}) for point in model.split_points}
    assert costs["decoder.layers.0"] == 10 * (4 * 16 * 16 + 3 * 16 * 256) + 2 * 16 * 100
    assert costs["decoder.layers.3"] == 10 * (4 * 16 * 16 + 3 * 16 * 32) + 2 * 16 * (1 + 2 + 8 * 3)
    pipeline = split_into_stages(model, "1f1b", 2, 1, lengths={"tokens": 10})
    assert first_steps(pipeline)[1] == "decoder.layers.2", "half of the blocks would not be half of the cost"


def test_heads_of_masked_models_weigh_what_the_objective_predicts(make: Callable[..., nn.Module]) -> None:
    model = make(family="encoder")
    head = {point.name: point for point in model.split_points}["head"]
    assert compute_cost(model, head, {"tokens": 10}, 0.4) == pytest.approx(4 * 96 * 16)
    assert compute_cost(model, head, {"tokens": 10}) == pytest.approx(1.5 * 96 * 16)


def test_a_stage_may_begin_with_any_head_that_costs_something(make: Callable[..., nn.Module]) -> None:
    """The head of span boundaries, too, is a stage of its own in an encoder with a large vocabulary."""
    model = make(family="encoder", n_layers=2, vocab_size=9600, extra_heads={"boundary": {}})
    pipeline = split_into_stages(model, "1f1b", 3, 1, lengths={"tokens": 32})
    assert first_steps(pipeline) == ["encoder.embedding", "head", "boundary"]


def test_stages_exchange_what_later_ones_read(make: Callable[..., nn.Module]) -> None:
    t5 = make(family="encoder_decoder", n_encoder_layers=2, **{"position.name": "t5"})
    pipeline = split_into_stages(t5, "interleaved", 2, 2, lengths={"tokens": 8, "encoder_tokens": 8}, pp_split_points=[
        "encoder.layers.1", "decoder.layers.2", "head",
    ])  # fmt: skip
    inputs, outputs = zip(*((list(stage.inputs), list(stage.outputs)) for stage in pipeline.stages), strict=True)
    assert inputs == ([], ["encoder_hidden"], ["encoder_hidden", "hidden"], ["hidden"])
    assert outputs == (*inputs[1:], [])
    assert pipeline.parameter_ranks["encoder.embedding.tokens.weight"] == (0, 1)
    assert pipeline.parameter_ranks["decoder.position.weight"] == (0, 1)
    assert pipeline.parameter_ranks["decoder.layers.5.ffn.w_up.weight"] == (0,)


@pytest.mark.parametrize("options", [
    {"attention.n_kv_heads": 1}, {"family": "encoder", "distinct_layers": 2},
    {"family": "encoder_decoder", "position.name": "t5"},
    {"family": "electra", "embedding.dim": 8, "position.name": "learned", "position.max_positions": 8,
     "generator": {"d_model": 8, "n_heads": 2, "d_ff": 8}},
])  # fmt: skip
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_rank_keeps_what_its_stages_use_under_the_same_names(
    make: Callable[..., nn.Module], options: dict[str, object], schedule: str
) -> None:
    names = [name for name, _ in make(**options).named_parameters()]
    ranks_by_name: dict[str, list[int]] = {}
    for rank in range(2):
        model = make(**options)
        pipeline = split_into_stages(
            model, schedule, 2, 2 if schedule == "zbv" else 1, lengths={"tokens": 8, "encoder_tokens": 8}
        )
        shapes = {name: p.shape for name, p in model.named_parameters()}
        prune_to_stages(model, pipeline.list_stages(rank))
        for name, parameter in model.named_parameters():
            assert parameter.shape == shapes[name]
            ranks_by_name.setdefault(name, []).append(rank)
        for stage in pipeline.list_stages(rank):
            for point in stage.split_points:
                for path in point.modules:
                    model.get_submodule(path)
    assert set(ranks_by_name) == set(names)
    assert {name: tuple(ranks) for name, ranks in ranks_by_name.items()} == dict(pipeline.parameter_ranks)


KINDS = (
    schedules.ScheduleInterleaved1F1B, schedules.ScheduleInterleavedZeroBubble, schedules.ScheduleZBVZeroBubble,
    schedules.ScheduleDualPipeV,
)  # fmt: skip
PLACE = {field.name for field in fields(FakeStage)}


class RecordingStage(FakeStage):
    """Notes what is read of it."""

    names: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name != "names":
            RecordingStage.names.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_ask_for_a_stage_s_place(kind: Any) -> None:
    RecordingStage.names.clear()
    at = (0, 3) if kind in KINDS[2:] else (0, 2)
    stages: list[FakeStage] = [RecordingStage(stage_index=i, num_stages=4, group_size=2) for i in at]
    order = get_torch_pipeline_order(kind, stages, 4)
    assert set(order) == {0, 1}
    assert "num_stages" in RecordingStage.names
    assert RecordingStage.names <= PLACE


# -------------------------------------------------------------------------------------------------- schedules


SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zero-bubble": 2, "zbv": 2, "dualpipev": 2,
}  # fmt: skip
MICROBATCHES = (1, 2, 3, 5, 8, 11)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_are_made_once_on_their_rank(schedule: str, ranks: int) -> None:
    rank_of = stage_to_rank(schedule, ranks, SCHEDULES[schedule])
    for microbatches in MICROBATCHES:
        order_of = build_schedule(schedule, ranks, SCHEDULES[schedule], microbatches)
        counts = Counter(action for order in order_of for action in order)
        assert set(counts.values()) == {1}
        for stage in range(len(rank_of)):
            for i in range(microbatches):
                kinds = {kind for s, kind, j in counts if (s, j) == (stage, i)}
                assert kinds in ({"F", "B"}, {"F", "I", "W"})
                assert "B" in kinds or schedule in SPLITS_BACKWARD
        for rank, order in enumerate(order_of):
            assert {rank_of[action.stage] for action in order} == {rank}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_meet_their_transfers_in_the_same_order(schedule: str, ranks: int) -> None:
    """Each transfer waits for the other side here, and none can overtake it."""
    rank_of = stage_to_rank(schedule, ranks, SCHEDULES[schedule])
    for microbatches in MICROBATCHES:
        plan = add_send_recv(build_schedule(schedule, ranks, SCHEDULES[schedule], microbatches), rank_of)
        sent = Counter(kind for order in plan for _, kind, _ in order if " " in kind)
        crossed = sum(a != b for a, b in pairwise(rank_of)) * microbatches
        ways = ("send F", "recv F", "send B", "recv B")
        assert sent == Counter({way: crossed for way in ways if crossed})
        pairs: dict[tuple[int, int], deque[tuple[str, int, int]]] = {}
        for rank, order in enumerate(plan):
            for stage, kind, i in order:
                if " " not in kind:
                    continue
                step = {"send F": 1, "recv B": 1}.get(kind, -1)
                boundary = min(stage, stage + step)
                pairs.setdefault((rank, rank_of[stage + step]), deque()).append((kind[-1], boundary, i))
        for (local, peer), transfers in pairs.items():
            assert transfers == pairs[peer, local]


Event = tuple[Any, ...]
"""(rank, stage, kind, micro-batch) of a pass; (way, stage, micro-batch) of a transfer from a stage, or back to it."""


def run_on_streams(plan: Schedule, rank_of: list[int], transfer: float, *, queued: bool) -> float:
    """Seconds of a step on GPUs. A rank's passes run on one stream, and on two others its transfers up and down, in the
    order asked for: a transfer on both of its ranks at once, after the passes that each has asked for before.

    queued: False: transfers wait for the sender's pass alone. Raises CycleError where one waits for ever.
    """
    waits_for: dict[Event, set[Event]] = {}
    for rank, order in enumerate(plan):
        last: dict[str, Event] = {}
        for stage, kind, i in order:
            way, is_transfer = "F" if kind[-1] == "F" else "B", " " in kind
            event: Event = (way, stage - (kind in ("recv F", "send B")), i) if is_transfer else (rank, stage, kind, i)
            earlier = waits_for.setdefault(event, set())
            if not is_transfer or queued or kind.startswith("send"):
                earlier |= {last["passes"]} if "passes" in last else set()
            if is_transfer and queued:
                earlier |= {last[way]} if way in last else set()
            source = stage - (way == "F")
            if not is_transfer and kind != "W" and 0 <= source < len(rank_of) - 1:
                earlier |= {(way, source, i)} if rank_of[source] != rank_of[source + 1] else set()
            last[way if is_transfer else "passes"] = event
    ends: dict[Event, float] = {}
    for event in TopologicalSorter(waits_for).static_order():
        cost = transfer if len(event) == 3 else PASS_SECONDS[event[2]]
        ends[event] = cost + max((ends[earlier] for earlier in waits_for[event]), default=0.0)
    return max(ends.values())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_transfer_waits_in_line_behind_one_that_is_not_ready(schedule: str, ranks: int) -> None:
    """NCCL runs the transfers of a group one after another. In an order without times, steps of eight ranks under
    "interleaved" took 1.7 times as long as they need."""
    rank_of = stage_to_rank(schedule, ranks, SCHEDULES[schedule])
    for microbatches in (*MICROBATCHES, ranks, 2 * ranks):
        plan = add_send_recv(build_schedule(schedule, ranks, SCHEDULES[schedule], microbatches), rank_of)
        for transfer, most in ((0.0, 1.005), (0.05, 1.005), (0.2, 1.1)):
            shortest = run_on_streams(plan, rank_of, transfer, queued=False)
            assert run_on_streams(plan, rank_of, transfer, queued=True) <= most * shortest, (microbatches, transfer)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_of_whole_backward_passes(schedule: str, ranks: int) -> None:
    """(p − 1) / (v·m + p − 1) of the time (Narayanan et al. 2021)."""
    virtual = SCHEDULES[schedule]
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        times = simulate_schedule(
            build_schedule(schedule, ranks, virtual, microbatches), stage_to_rank(schedule, ranks, virtual)
        )
        assert bubble_fraction(times) == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bubble_of_split_backward_passes(ranks: int) -> None:
    """A rank waits (p − 1)·(T_F + T_I − T_W) between its first and last pass, and in zbv never (Qi et al. 2023)."""

    def waits(schedule: str, virtual: int) -> list[float]:
        order_of = build_schedule(schedule, ranks, virtual, 4 * ranks)
        times = simulate_schedule(order_of, stage_to_rank(schedule, ranks, virtual))
        return [rank.last - rank.first - rank.seconds for rank in times]

    assert max(waits("interleaved-zero-bubble", 1)) == (ranks - 1) * (1 + 1 - 1)
    assert max(waits("zbv", 2)) == 0


def test_1f1b_holds_as_many_micro_batches_as_there_are_ranks_ahead() -> None:
    for rank, order in enumerate(build_schedule("1f1b", 4, 1, 12)):
        in_flight = most = 0
        for action in order:
            in_flight += {"F": 1, "B": -1}[action.kind]
            most = max(most, in_flight)
        assert most == 4 - rank


def test_stages_of_a_v_go_down_and_up() -> None:
    assert all(stage_to_rank(schedule, 3, 2) == [0, 1, 2, 2, 1, 0] for schedule in V_SHAPED)
    assert stage_to_rank("interleaved", 2, 3) == [0, 1, 0, 1, 0, 1]


def test_a_schedule_that_deadlocks_is_an_error() -> None:
    wrong = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ValueError, match="schedule deadlocks"):
        add_send_recv(wrong, [0, 1])
    with pytest.raises(ValueError, match="schedule deadlocks"):
        simulate_schedule(wrong, [0, 1])
