"""Time of a pipeline's ranks when each pass takes as long as it is said to, and transfers take none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatfm.parallel.pipeline_schedule import Action, Schedule


@dataclass(frozen=True)
class Busy:
    """One rank's time, in a simulated step: from its first pass to its last, and how long it computes."""

    first: float
    last: float
    seconds: float


def simulate(
    actions_by_rank: Schedule, stage_to_rank: Sequence[int], seconds: Mapping[str, float]
) -> list[Busy]:
    """Each rank's time. seconds: of a pass of each kind, {"F": …, "B": …, "I": …, "W": …}.

    Raises ValueError for an order in which a pass waits for ever.
    """
    ends: dict[tuple[int, str, int], float] = {}
    free, starts = [0.0] * len(actions_by_rank), [float("inf")] * len(actions_by_rank)
    queues = [[*order] for order in actions_by_rank]
    while any(queues):
        waiting = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and all(need in ends for need in _needs(queue[0], len(stage_to_rank))):
                action = queue.pop(0)
                start = max([free[rank], *(ends[need] for need in _needs(action, len(stage_to_rank)))])
                starts[rank] = min(starts[rank], start)
                kind = "B" if action.kind == "I" else action.kind
                free[rank] = ends[action.stage, kind, action.microbatch] = start + seconds[action.kind]
        if sum(map(len, queues)) == waiting:
            raise ValueError(f"the schedule deadlocks at: {[queue[0] for queue in queues if queue]}")
    return [
        Busy(first, last, sum(seconds[action.kind] for action in order))
        for first, last, order in zip(starts, free, actions_by_rank, strict=True)
    ]


def bubble(times: Sequence[Busy]) -> float:
    """Share of all ranks' time, from the first pass of any to the last, in which they wait."""
    span = max(rank.last for rank in times) - min(rank.first for rank in times)
    return 1 - sum(rank.seconds for rank in times) / (len(times) * span)


def _needs(action: Action, stages: int) -> list[tuple[int, str, int]]:
    stage, kind, i = action
    if kind == "W":
        return [(stage, "B", i)]
    if kind == "F":
        return [(stage - 1, "F", i)] if stage > 0 else []
    return [(stage, "F", i)] + ([(stage + 1, "B", i)] if stage < stages - 1 else [])
