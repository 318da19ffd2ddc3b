"""Pipeline schedules: the order of forward and backward passes on each rank.

| Schedule | Stages a rank | Source |
|---|---|---|
| gpipe | 1 | all forward, then all backward (Huang et al. 2019) |
| 1f1b | 1 | one forward, one backward (Narayanan et al. 2019; Fan et al. 2021): at most p micro-batches in flight |
| interleaved | v, in a loop | Narayanan et al. 2021 |
| interleaved-zero-bubble | v, in a loop | weight gradients fill the bubbles (Qi et al. 2023) |
| zbv | 2, in a V | Qi et al. 2024 |
| dualpipev | 2, in a V | DeepSeek-AI 2024, its V form |

The last four come from torch. They need certain numbers of micro-batches, so we plan for enough of them and drop the
actions of the surplus ones; the remaining order is still valid. `engines/pipeline.py` executes the schedules.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

Kind = Literal["F", "B", "I", "W", "send F", "recv F", "send B", "recv B"]
"""Forward (F); backward: full (B), or split into input gradients (I) and, later, weight gradients (W); transfers."""

V_SHAPED = ("zbv", "dualpipev")
SPLITS_BACKWARD = ("interleaved-zero-bubble", *V_SHAPED)
"""Schedules that split the backward pass into input and weight gradients."""


class Action(NamedTuple):
    """One pass or transfer of one micro-batch in one stage."""

    stage: int
    kind: Kind
    microbatch: int


Schedule = list[list[Action]]
"""Actions in order, by rank."""


def stage_to_rank(schedule: str, ranks: int, stages_per_rank: int) -> list[int]:
    """Return the rank of each stage: in a loop over the ranks, or in a V (down the ranks and up again)."""
    if schedule in V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * stages_per_rank)]


def build_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Order the forward and backward passes on each rank."""
    if schedule == "gpipe":
        kinds: tuple[Kind, Kind] = ("F", "B")
        return [[Action(r, kind, i) for kind in kinds for i in range(microbatches)] for r in range(ranks)]
    if schedule == "1f1b":
        return [_make_1f1b_order(rank, ranks, microbatches) for rank in range(ranks)]
    return _make_torch_orders(schedule, ranks, stages_per_rank, microbatches)


def _make_1f1b_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    n_warmup = min(ranks - 1 - rank, microbatches)
    order = [Action(rank, "F", i) for i in range(n_warmup)]
    for i in range(microbatches):
        if n_warmup + i < microbatches:
            order.append(Action(rank, "F", n_warmup + i))
        order.append(Action(rank, "B", i))
    return order


def _make_torch_orders(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    from torch.distributed.pipelining import schedules

    schedule_class, min_microbatches = {
        "interleaved": (schedules.ScheduleInterleaved1F1B, 1),
        "interleaved-zero-bubble": (schedules.ScheduleInterleavedZeroBubble, 1),
        "zbv": (schedules.ScheduleZBVZeroBubble, 1),
        "dualpipev": (schedules.ScheduleDualPipeV, 2 * ranks),
    }[schedule]
    n_planned = max(microbatches, min_microbatches)
    if n_planned % max(1, n_planned // ranks):
        n_planned = -(-n_planned // ranks) * ranks
    stages = [
        FakeStage(stage_index=stage, num_stages=ranks * stages_per_rank, group_size=ranks)
        for stage, rank in enumerate(stage_to_rank(schedule, ranks, stages_per_rank))
        if rank == 0
    ]
    order = get_torch_pipeline_order(schedule_class, stages, n_planned)
    return [
        [
            Action(action.stage_index, action.computation_type.value, action.microbatch_index)
            for step in order[rank]
            if step is not None
            for action in (step.sub_actions or (step,))
            if action.microbatch_index is not None and action.microbatch_index < microbatches
        ]
        for rank in range(ranks)
    ]


@dataclass
class FakeStage:
    """Stand-in for a torch PipelineStage, with the few attributes that torch's schedules read.

    `tests/unit/parallel/test_pipeline_stages.py` fails if a new torch reads more.
    """

    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index: int = 0
    num_stages: int = 1
    group_size: int = 1
    group_rank: int = 0


def get_torch_pipeline_order(schedule: Any, stages: list[FakeStage], microbatches: int) -> Any:
    """Return rank → actions of a torch schedule with several stages per rank. stages: those of rank 0.

    Torch's lowering to sends and gathers is left out: nobody reads it, and it takes long for many micro-batches.
    """
    order_only = type(schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": lambda self, actions: None})
    return order_only(stages, microbatches).pipeline_order


PASS_COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
TRANSFER_COST = 0.05
"""Relative times of passes and of a transfer, by which transfers are ordered; others make little difference."""


def add_send_recv(actions_by_rank: Schedule, rank_of: Sequence[int]) -> Schedule:
    """Add sends and receives. rank_of: rank of each stage.

    NCCL runs the transfers of a process group one after another, in the order in which a rank asks for them, and two
    ranks must ask for those between them in the same order. Here all ranks take them by the time at which the sender's
    pass ends in a simulation. A receive comes before the pass that its rank runs at that time, since it waits for all
    passes asked for before it.

    Raises ValueError for a schedule that deadlocks.
    """
    pending = [deque(order) for order in actions_by_rank]
    ends: dict[tuple[int, str, int], float] = {}
    last_end_by_rank = [0.0] * len(pending)
    startable: dict[int, float] = {}  # rank → end of its next pass
    planned: Schedule = [[] for _ in actions_by_rank]
    while any(pending):
        for rank, queue in enumerate(pending):
            if queue and rank not in startable:
                prerequisites = _find_prerequisites(queue[0], len(rank_of))
                if all(pass_ in ends for pass_ in prerequisites):
                    arrivals = (ends[pass_] + TRANSFER_COST * (rank_of[pass_[0]] != rank) for pass_ in prerequisites)
                    startable[rank] = max([last_end_by_rank[rank], *arrivals]) + PASS_COSTS[queue[0].kind]
        if not startable:
            raise ValueError(f"the schedule deadlocks at: {[queue[0] for queue in pending if queue]}")
        rank = min(startable, key=lambda rank: (startable[rank], rank))  # no other pass can end before it
        end = startable.pop(rank)
        action, last_end_by_rank[rank] = pending[rank].popleft(), end
        planned[rank].append(action)
        ends[action.stage, "B" if action.kind == "I" else action.kind, action.microbatch] = end
        direction = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        target = action.stage + direction
        if direction and 0 <= target < len(rank_of) and rank_of[target] != rank:
            kinds: tuple[Kind, Kind] = ("send F", "recv F") if direction == 1 else ("send B", "recv B")
            planned[rank].append(Action(action.stage, kinds[0], action.microbatch))
            planned[rank_of[target]].append(Action(target, kinds[1], action.microbatch))
    return planned


def _find_prerequisites(action: Action, stages: int) -> list[tuple[int, str, int]]:
    """Return the passes, of any rank, that must come before this action."""
    stage, kind, i = action
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [(stage, "B", i)]
    return [(stage, "F", i), *([(stage + 1, "B", i)] if stage + 1 < stages else [])]


BackwardPart = Literal["inputs", "weights"]

_backward_parts: list[BackwardPart] = []
"""A global, not a thread-local: on a GPU, autograd runs backward functions in its own threads."""


@contextmanager
def mark_backward_part(part: BackwardPart) -> Iterator[None]:
    """Mark which part of a split backward pass runs, for autograd functions that compute both at once."""
    _backward_parts.append(part)
    try:
        yield
    finally:
        _backward_parts.pop()


def get_current_backward_part() -> BackwardPart | None:
    """Return the part of the backward pass that runs now; None if it is not split."""
    return _backward_parts[-1] if _backward_parts else None
