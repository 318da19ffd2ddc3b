"""Layouts that several tests go through, a grid dealt out, traffic in closed form, a simulated pipeline."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet

from megatfm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
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
PIPELINE_SCHEDULES: tuple[Any, ...] = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")
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


EXTENDED, SLOW = pytest.mark.extended, pytest.mark.slow
Grid = Mapping[str, Collection[str]]
"""Model → the layouts that it is tried under."""
Cell = tuple[int, str, str]
"""Ranks, model, layout."""


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


def choose_cells(dealt: Mapping[int, Grid], always: Collection[str] = ()) -> set[Cell]:
    """Cells of `make test`: each layout once, each model once on several ranks, and what all of them have."""
    all_cells = [(n, model, layout) for n, hands in dealt.items() for model in hands for layout in hands[model]]
    chosen = {cell for cell in all_cells if cell[2] in always}
    for n, _, layout in all_cells:
        takers = [cell for cell in all_cells if cell[0] == n and cell[2] == layout]
        if chosen.isdisjoint(takers):
            often = Counter(model for ranks, model, _ in chosen if ranks > 1)
            chosen.add(min(takers, key=lambda cell: often[cell[1]]))
    for model in dict.fromkeys(model for _, model, _ in all_cells):
        cells = [cell for cell in all_cells if cell[1] == model and (cell[0] > 1 or max(dealt) == 1)]
        if chosen.isdisjoint(cells):
            chosen.add(cells[0])
    return chosen


def make_cases(
    grid: Grid,
    *more: object,
    rounds: int = 1,
    always: Collection[str] = (),
    extended: Collection[str] = (),
    label: str = "",
) -> list[ParameterSet]:
    """Cases (model, layouts, *more) for `parametrize`: what each is dealt and always has; slow, all others.

    extended: models and layouts that `make test` leaves to the tier of this name.
    """
    cases = []
    for model, hand in deal_layouts(grid, rounds).items():
        dealt = [layout for layout in grid[model] if layout in hand or layout in always]
        later = dealt if model in extended else [layout for layout in dealt if layout in extended]
        cases += _make_model_cases(model, grid[model], dealt, later, more, label)
    return cases


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
    extended: Mapping[int, Collection[str]] | None = None,
) -> list[ParameterSet]:
    """Cases (model, layouts, ranks) of a grid for each number of ranks. Of what models are dealt, `make test` has what
    `choose_cells` says, less those in `extended`: ranks → layouts.
    """
    dealt = {
        ranks: {
            model: [layout for layout in names if layout in hand or layout in always]
            for model, hand in deal_layouts(dict.fromkeys(models, names), rounds).items()
        }
        for ranks, names in layouts.items()
    }
    chosen = {cell for cell in choose_cells(dealt, always) if cell[2] not in (extended or {}).get(cell[0], ())}
    return [
        case
        for ranks, hands in dealt.items()
        for model, hand in hands.items()
        for case in _make_model_cases(
            model, layouts[ranks], hand, {layout for layout in hand if (ranks, model, layout) not in chosen},
            (ranks,), f" on {ranks}",
        )
    ]  # fmt: skip


def _make_model_cases(
    model: str,
    layouts: Collection[str],
    dealt: Collection[str],
    extended: Collection[str],
    more: Sequence[object],
    label: str,
) -> list[ParameterSet]:
    shares: list[tuple[str, list[str], Sequence[pytest.MarkDecorator]]] = [
        ("", [layout for layout in dealt if layout not in extended], ()),
        (", extended", [layout for layout in dealt if layout in extended], (EXTENDED,)),
        (", the others", [layout for layout in layouts if layout not in dealt], (SLOW,)),
    ]
    return [
        pytest.param(model, share, *more, id=f"{model}{label}{suffix}", marks=marks)
        for suffix, share, marks in shares
        if share
    ]


def traffic_config(
    model: ModelConfig,
    objective: ObjectiveConfig,
    parallel: ParallelConfig,
    *,
    optimizer: Any = ADAMW,
    recompute: str = "none",
    plugins: Sequence[str] = (),
) -> Config:
    """Two micro-batches a step, and one more with stages."""
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    return Config(
        name="x", plugins=list(plugins), model=model, objective=objective,
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


def count_sent_bytes(config: Config, world_size: int) -> dict[tuple[str, str], int]:
    """(axis, collective) → bytes that this rank sends in a step on one document per row."""
    flows = _step(config, draw_batch(config, "one"), world_size).traffic
    return {(flow.axis, flow.collective): flow.sent_bytes for flow in flows}


@dataclass(frozen=True)
class RankTime:
    """One rank's time, in a simulated step: from its first pass to its last, and how long it computes."""

    first: float
    last: float
    seconds: float


PASS_SECONDS: dict[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}


def simulate_schedule(
    actions_by_rank: Schedule, stage_to_rank: Sequence[int], seconds: Mapping[str, float] = PASS_SECONDS
) -> list[RankTime]:
    """Each rank's time. seconds: of a pass of each kind.

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
