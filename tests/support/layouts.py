"""Layouts that several tests go through, a grid dealt out, traffic in closed form, a simulated pipeline."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet

from megatfm.config import Config, DataConfig, ModelConfig, OptimizerSection, ParallelConfig, TrainConfig
from megatfm.config.objective import ObjectiveConfig
from megatfm.parallel.pipeline_schedule import Action, Schedule
from megatfm.verify.expected import compute_expected_traffic
from megatfm.verify.rank_processes import RankResult, _step
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import find_traffic_mismatches
from tests.support.models import ADAMW, LENGTH
from tests.support.workers import Workers

DATA_AND_TENSOR_LAYOUTS = {
    "zero3 on 1": ParallelConfig(),
    "zero0 on 2": ParallelConfig(dp_shard=2, zero=0),
    "zero1 on 2": ParallelConfig(dp_shard=2, zero=1),
    "zero2 on 2": ParallelConfig(dp_shard=2, zero=2),
    "zero3 on 2": ParallelConfig(dp_shard=2),
    "zero3 on 2, shards accumulated": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
    "replicas on 2": ParallelConfig(dp_replicate=2, dp_shard=1),
    "tp2": ParallelConfig(tp=2),
    "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
    "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
    "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
    "hsdp 2 × 2": ParallelConfig(dp_replicate=2, dp_shard=2),
    "zero1 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=1),
}
RANKS_OF_LAYOUT = {
    layout: parallel.dp_replicate * max(parallel.dp_shard, 1) * parallel.tp
    for layout, parallel in DATA_AND_TENSOR_LAYOUTS.items()
}
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")
FAMILY_LAYOUTS = {
    2: {"zero0": ParallelConfig(dp_shard=2, zero=0), "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2), "zero3": ParallelConfig(dp_shard=2), "tp2": ParallelConfig(tp=2),
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False)},
    4: {"hsdp 2 × 2": ParallelConfig(dp_replicate=2, dp_shard=2), "tp4": ParallelConfig(tp=4),
        "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1), "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2)},
}  # fmt: skip
"""Ranks → layouts. Those of equally many ranks share one call, and so the reference."""
PLAIN_LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {"tp2": ParallelConfig(tp=2), "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2), "zero3": ParallelConfig(dp_shard=2)},
}  # fmt: skip
"""Ranks → one layout of each kind."""


SLOW = pytest.mark.slow
EXTENDED = pytest.mark.extended
Grid = Mapping[str, Collection[str]]
"""Model → the layouts that it is tried under."""


def deal_layouts(grid: Grid, rounds: int = 1) -> dict[str, list[str]]:
    """A share for each model: every layout goes to `rounds` of its models in turn, and no model goes without."""
    hands: dict[str, list[str]] = {model: [] for model in grid}
    layouts = dict.fromkeys(layout for layouts_of_model in grid.values() for layout in layouts_of_model)
    for turn in range(rounds):
        order = [*grid][:: -1 if turn % 2 else 1]  # to and fro, or the first had two cards and the last none
        for layout in layouts:
            takers = [model for model in order if layout in grid[model] and layout not in hands[model]]
            if takers:
                hands[min(takers, key=lambda model: len(hands[model]))].append(layout)
    for model, hand in hands.items():
        if not hand:
            often = Counter(layout for hand_layouts in hands.values() for layout in hand_layouts)
            hand.append(min(grid[model], key=lambda layout: often[layout]))
    return hands


def make_cases(
    grid: Grid, *more: object, rounds: int = 1, always: Collection[str] = (), label: str = ""
) -> list[ParameterSet]:
    """Cases (model, layouts, *more) for `parametrize`: what each is dealt and always has; slow, all others."""
    actual = []
    for model, hand in deal_layouts(grid, rounds).items():
        now = [layout for layout in grid[model] if layout in hand or layout in always]
        later = [layout for layout in grid[model] if layout not in now]
        actual.append(pytest.param(model, now, *more, id=f"{model}{label}"))
        if later:
            actual.append(pytest.param(model, later, *more, id=f"{model}{label}, the others", marks=SLOW))
    return actual


def extend(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """Cases for `parametrize`: `make test` runs those that are kept, `make test-extended` the others."""
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=EXTENDED)
        for case in cases
    ]


def make_cases_by_ranks(
    models: Collection[str],
    layouts: Mapping[int, Collection[str]],
    rounds: int = 1,
    always: Collection[str] = (),
) -> list[ParameterSet]:
    """Cases (model, layouts, ranks) of a grid for each number of ranks."""
    return [
        case
        for ranks, names in layouts.items()
        for case in make_cases(dict.fromkeys(models, names), ranks, rounds=rounds, always=always, label=f" on {ranks}")
    ]


def traffic_config(
    model: ModelConfig,
    objective: ObjectiveConfig,
    parallel: ParallelConfig,
    *,
    optimizer: OptimizerSection = ADAMW,
    recompute: str = "none",
    plugins: Sequence[str] = (),
) -> Config:
    """Two micro-batches a step, and one more with stages."""
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    return Config(
        name="x", plugins=tuple(plugins), model=model, objective=objective,
        data=DataConfig(train="t", tokenizer="m", sequence_length=LENGTH,
                        target_length=LENGTH if model.family == "encoder_decoder" else None),
        parallel=parallel, optimizer=optimizer,
        train=TrainConfig(steps=1, global_batch=2 * (3 if parallel.pp > 1 else 2) * data_ranks, micro_batch=2,
                          precision="fp64", recompute=recompute),
    )  # fmt: skip


def count_traffic(configs: list[Config]) -> list[RankResult]:
    """The traffic of a step of each config on this rank."""
    return [_step(config, draw_batch(config), dist.get_world_size()) for config in configs]


def list_traffic_mismatches(workers: Workers, ranks: int, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """Layouts with flows that are not as expected, and a line for each such flow."""
    by_rank = workers.run(count_traffic, ranks, list(configs.values()), timeout=180.0)
    actual = {}
    for (layout, config), answers in zip(configs.items(), zip(*by_rank, strict=True), strict=True):
        if misses := find_traffic_mismatches(answers, compute_expected_traffic(config, draw_batch(config))):
            actual[layout] = misses
    return actual


@dataclass(frozen=True)
class RankTime:
    """One rank's time, in a simulated step: from its first pass to its last, and how long it computes."""

    first: float
    last: float
    seconds: float


def simulate_schedule(
    actions_by_rank: Schedule, stage_to_rank: Sequence[int], seconds: Mapping[str, float]
) -> list[RankTime]:
    """Each rank's time. seconds: of a pass of each kind, {"F": …, "B": …, "I": …, "W": …}.

    Raises ValueError for an order in which a pass waits for ever.
    """
    ends: dict[tuple[int, str, int], float] = {}
    free, starts = [0.0] * len(actions_by_rank), [float("inf")] * len(actions_by_rank)
    queues = [[*order] for order in actions_by_rank]
    while any(queues):
        waiting = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and all(need in ends for need in _inputs_of_action(queue[0], len(stage_to_rank))):
                action = queue.pop(0)
                start = max([free[rank], *(ends[need] for need in _inputs_of_action(action, len(stage_to_rank)))])
                starts[rank] = min(starts[rank], start)
                kind = "B" if action.kind == "I" else action.kind
                free[rank] = ends[action.stage, kind, action.microbatch] = start + seconds[action.kind]
        if sum(map(len, queues)) == waiting:
            raise ValueError(f"the schedule deadlocks at: {[queue[0] for queue in queues if queue]}")
    return [
        RankTime(first, last, sum(seconds[action.kind] for action in order))
        for first, last, order in zip(starts, free, actions_by_rank, strict=True)
    ]


def bubble_fraction(times: Sequence[RankTime]) -> float:
    """Share of all ranks' time, from the first pass of any to the last, in which they wait."""
    span = max(rank.last for rank in times) - min(rank.first for rank in times)
    return 1 - sum(rank.seconds for rank in times) / (len(times) * span)


def _inputs_of_action(action: Action, stages: int) -> list[tuple[int, str, int]]:
    stage, kind, i = action
    if kind == "W":
        return [(stage, "B", i)]
    if kind == "F":
        return [(stage - 1, "F", i)] if stage > 0 else []
    return [(stage, "F", i)] + ([(stage + 1, "B", i)] if stage < stages - 1 else [])
