"""Pipeline schedules: which rank does what in which order, and what their order is worth.

| Schedule | Stages a rank | Source |
|---|---|---|
| gpipe | 1 | all forward, then all backward (Huang et al. 2019) |
| 1f1b | 1 | one forward, one backward (Narayanan et al. 2019; Fan et al. 2021): a rank holds at most p micro-batches |
| interleaved | v, in a loop | Narayanan et al. 2021 |
| interleaved-zero-bubble | v, in a loop | weights' gradients fill the gaps (Qi et al. 2023) |
| zbv | 2, in a V | Qi et al. 2024 |
| dualpipev | 2, in a V | DeepSeek-AI 2024, its V form |

The last four orders are torch's. An order for more micro-batches than there are stays one when the actions of those
beyond are left out, so each schedule takes any number of micro-batches.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatfm.parallel.torch_stage import FakeStage, torch_pipeline_order

Kind = Literal["F", "B", "I", "W", "send F", "recv F", "send B", "recv B"]
"""Forward; backward, whole (B) or in two parts: of the input (I) and later of the weights (W); transfers."""

V_SHAPED = ("zbv", "dualpipev")
SPLITS_BACKWARD = ("interleaved-zero-bubble", *V_SHAPED)
"""Schedules that compute gradients of weights apart from those of inputs."""


class Action(NamedTuple):
    """What a rank does to one micro-batch in one of its stages."""

    stage: int
    kind: Kind
    microbatch: int


Schedule = list[list[Action]]
"""By rank."""


def stage_to_rank(schedule: str, ranks: int, virtual: int) -> list[int]:
    """The rank of each stage: in a loop, or in a V, down the ranks and up again."""
    if schedule in V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * virtual)]


def build_schedule(schedule: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """The order of forward and backward passes on each rank."""
    if schedule == "gpipe":
        both: tuple[Kind, Kind] = ("F", "B")
        return [[Action(r, kind, i) for kind in both for i in range(microbatches)] for r in range(ranks)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    return _torch_orders(schedule, ranks, virtual, microbatches)


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, microbatches)
    order = [Action(rank, "F", i) for i in range(ahead)]
    for i in range(microbatches):
        if ahead + i < microbatches:
            order.append(Action(rank, "F", ahead + i))
        order.append(Action(rank, "B", i))
    return order


def _torch_orders(schedule: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    from torch.distributed.pipelining import schedules

    made, at_least = {
        "interleaved": (schedules.ScheduleInterleaved1F1B, 1),
        "interleaved-zero-bubble": (schedules.ScheduleInterleavedZeroBubble, 1),
        "zbv": (schedules.ScheduleZBVZeroBubble, 1),
        "dualpipev": (schedules.ScheduleDualPipeV, 2 * ranks),
    }[schedule]
    fitting = max(microbatches, at_least)
    if fitting % max(1, fitting // ranks):
        fitting = -(-fitting // ranks) * ranks
    stages = [
        FakeStage(stage_index=stage, num_stages=ranks * virtual, group_size=ranks)
        for stage, rank in enumerate(stage_to_rank(schedule, ranks, virtual))
        if rank == 0
    ]
    planned = torch_pipeline_order(made, stages, fitting)
    found: Schedule = []
    for rank in range(ranks):
        steps = [part for step in planned[rank] if step is not None for part in (step.sub_actions or (step,))]
        found.append(
            [
                Action(step.stage_index, step.computation_type.value, step.microbatch_index)
                for step in steps
                if step.microbatch_index is not None and step.microbatch_index < microbatches
            ]
        )
    return found


def add_send_recv(actions_by_rank: Schedule, rank_of: Sequence[int]) -> Schedule:
    """The same with sends and receives: each receive stands where its sender sends if all ranks go step by step, so
    that two ranks meet the transfers between them in the same order, which NCCL needs.

    Raises ValueError for orders in which a pass waits for ever.
    """
    left, done = [deque(order) for order in actions_by_rank], set[tuple[int, str, int]]()
    planned: Schedule = [[] for _ in actions_by_rank]
    while any(left):
        moved = False
        for rank, queue in enumerate(left):
            if not queue or not done.issuperset(_needs(queue[0], len(rank_of))):
                continue
            action, moved = queue.popleft(), True
            planned[rank].append(action)
            done.add(_done(action))
            onward = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            target = action.stage + onward
            if onward and 0 <= target < len(rank_of) and rank_of[target] != rank:
                way: Literal["F", "B"] = "F" if onward == 1 else "B"
                send: Kind = "send F" if way == "F" else "send B"
                receive: Kind = "recv F" if way == "F" else "recv B"
                planned[rank].append(Action(action.stage, send, action.microbatch))
                planned[rank_of[target]].append(Action(target, receive, action.microbatch))
        if not moved:
            raise ValueError(
                f"the order of a schedule waits for ever: {[queue[0] for queue in left if queue]}"
            )
    return planned


def _done(action: Action) -> tuple[int, str, int]:
    return action.stage, {"I": "B"}.get(action.kind, action.kind), action.microbatch


def _needs(action: Action, stages: int) -> list[tuple[int, str, int]]:
    """What must be done before, by anyone."""
    stage, kind, i = action
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [(stage, "B", i)]
    return [(stage, "F", i), *([(stage + 1, "B", i)] if stage + 1 < stages else [])]


@dataclass(frozen=True)
class Busy:
    """One rank's time, in a simulated step: from its first pass to its last, and how long it computes."""

    first: float
    last: float
    seconds: float


def simulate(order_of: Schedule, rank_of: Sequence[int], seconds: Mapping[str, float]) -> list[Busy]:
    """Each rank's time where transfers take none. seconds: of a pass of each kind, {"F": …, "B": …, "I": …, "W": …}."""
    free, starts = [0.0] * len(order_of), [float("inf")] * len(order_of)
    ends: dict[tuple[int, str, int], float] = {}
    left = [deque(order) for order in order_of]
    while any(left):
        for rank, queue in enumerate(left):
            while queue and ends.keys() >= set(_needs(queue[0], len(rank_of))):
                action = queue.popleft()
                start = max([free[rank], *(ends[need] for need in _needs(action, len(rank_of)))])
                starts[rank] = min(starts[rank], start)
                free[rank] = ends[_done(action)] = start + seconds[action.kind]
    return [
        Busy(first, last, sum(seconds[action.kind] for action in order))
        for first, last, order in zip(starts, free, order_of, strict=True)
    ]


def bubble(times: Sequence[Busy]) -> float:
    """Of all ranks' time from the first pass of any to the last, the share in which they wait."""
    whole = len(times) * (max(rank.last for rank in times) - min(rank.first for rank in times))
    return 1 - sum(rank.seconds for rank in times) / whole
