"""Pipeline schedules: which rank runs which pass of which stage, in which order.

| Schedule | Stages a rank | Source |
|---|---|---|
| gpipe | 1 | all forward, then all backward (Huang et al. 2019) |
| 1f1b | 1 | one forward, one backward (Narayanan et al. 2019; Fan et al. 2021): p micro-batches at most on a rank |
| interleaved | v, in a loop | Narayanan et al. 2021 |
| interleaved-zero-bubble | v, in a loop | weights' gradients fill the gaps (Qi et al. 2023) |
| zbv | 2, in a V | Qi et al. 2024 |
| dualpipev | 2, in a V | DeepSeek-AI 2024, its V form |

The last four orders are torch's. An order for more micro-batches than there are stays one when the actions of those
beyond are left out, so each schedule takes any number of micro-batches. `engines/pipeline.py` carries orders out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

Kind = Literal["F", "B", "I", "W", "send F", "recv F", "send B", "recv B"]
"""Forward; backward, whole (B) or in two parts: of the input (I) and later of the weights (W); transfers."""

V_SHAPED = ("zbv", "dualpipev")
SPLITS_BACKWARD = ("interleaved-zero-bubble", *V_SHAPED)
"""Schedules that compute gradients of weights apart from those of inputs."""


class Action(NamedTuple):
    """Action of a rank on one micro-batch in one of its stages."""

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
        kinds: tuple[Kind, Kind] = ("F", "B")
        return [[Action(r, kind, i) for kind in kinds for i in range(microbatches)] for r in range(ranks)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    return _torch_orders(schedule, ranks, virtual, microbatches)


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    n_warmup = min(ranks - 1 - rank, microbatches)
    order = [Action(rank, "F", i) for i in range(n_warmup)]
    for i in range(microbatches):
        if n_warmup + i < microbatches:
            order.append(Action(rank, "F", n_warmup + i))
        order.append(Action(rank, "B", i))
    return order


def _torch_orders(schedule: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    from torch.distributed.pipelining import schedules

    schedule_class, at_least = {
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
    order = torch_pipeline_order(schedule_class, stages, fitting)
    actions_by_rank: Schedule = []
    for rank in range(ranks):
        steps = [part for step in order[rank] if step is not None for part in (step.sub_actions or (step,))]
        actions_by_rank.append(
            [
                Action(step.stage_index, step.computation_type.value, step.microbatch_index)
                for step in steps
                if step.microbatch_index is not None and step.microbatch_index < microbatches
            ]
        )
    return actions_by_rank


@dataclass
class FakeStage:
    """Stands in for a stage of torch.distributed.pipelining, of which none is ever made: torch's schedules ask a stage
    for its index before they plan, and its reduction of gradients for its module. torch writes on it where others are.

    `tests/unit/parallel/test_torch_stage.py` says with which version of torch they ask for more.
    """

    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index: int = 0
    num_stages: int = 1
    group_size: int = 1
    group_rank: int = 0


def torch_pipeline_order(schedule: Any, stages: list[FakeStage], microbatches: int) -> Any:
    """Rank → its actions, by one of torch's schedules for several stages on a rank. stages: those of rank 0."""
    return schedule(stages, microbatches).pipeline_order


def reduce_gradients(module: nn.Module) -> None:
    """Have FSDP2 reduce the gradients of a module's last backward passes, without scaling them. A collective."""
    from torch.distributed.pipelining import PipelineStage

    PipelineStage.perform_reduce_grad(FakeStage(module), 1)  # type: ignore[arg-type]


def add_send_recv(actions_by_rank: Schedule, rank_of: Sequence[int]) -> Schedule:
    """Add sends and receives: each receive stands where its sender sends if all ranks go step by step, so that two
    ranks meet the transfers between them in the same order, which NCCL needs.

    Raises ValueError for orders that deadlock.
    """
    pending, done = [deque(order) for order in actions_by_rank], set[tuple[int, str, int]]()
    planned: Schedule = [[] for _ in actions_by_rank]
    while any(pending):
        moved = False
        for rank, queue in enumerate(pending):
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
                f"the order of a schedule waits for ever: {[queue[0] for queue in pending if queue]}"
            )
    return planned


def _done(action: Action) -> tuple[int, str, int]:
    return action.stage, {"I": "B"}.get(action.kind, action.kind), action.microbatch


def _needs(action: Action, stages: int) -> list[tuple[int, str, int]]:
    """Passes that must be done before, by any rank."""
    stage, kind, i = action
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [(stage, "B", i)]
    return [(stage, "F", i), *([(stage + 1, "B", i)] if stage + 1 < stages else [])]


BackwardPart = Literal["inputs", "weights"]

_UNDER_WAY: list[BackwardPart] = []
"""A variable of the process, not of a thread: on a GPU, autograd runs functions in threads of its own."""


@contextmanager
def under_way(part: BackwardPart) -> Iterator[None]:
    """Mark calls of autograd as one part of a backward pass in two, for functions that compute both parts at once."""
    _UNDER_WAY.append(part)
    try:
        yield
    finally:
        _UNDER_WAY.pop()


def current_part() -> BackwardPart | None:
    """The part that is under way; None in a backward pass that is not split."""
    return _UNDER_WAY[-1] if _UNDER_WAY else None
