"""Simulates a pipeline's step: each rank runs the passes of the real schedule with the times of their stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatfm.parallel.pipeline_schedule import Action, Kind, build_schedule

Ends = Mapping[str, Sequence[list[float | None]]]
"""Ends of passes by kind, stage and micro-batch; None: it has not run."""


@dataclass(frozen=True)
class Pass:
    """Pass of a micro-batch through a stage; start and end in seconds."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Simulated step."""

    passes: Sequence[Pass]
    seconds: float
    """Seconds of the step."""
    busy: Sequence[float]
    """Seconds of each rank's passes."""

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


@lru_cache(maxsize=64)
def _order_passes(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Sequence[Sequence[Action]]:
    """Return the passes of each rank; many layouts of a search share them."""
    return build_schedule(schedule, ranks, stages_per_rank, microbatches)


def simulate(
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    rank_of: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
    transfer: float,
) -> Timeline:
    """Simulate a step.

    rank_of: rank of each stage. seconds: kind of pass → seconds of each stage. transfer: seconds of a transfer between
    stages on two ranks.
    """
    queues = _order_passes(schedule, ranks, stages_per_rank, microbatches)
    positions, free, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    ends: Ends = {kind: [[None] * microbatches for _ in rank_of] for kind in "FBW"}
    passes: list[Pass] = []
    is_progressing = True
    while is_progressing:
        is_progressing = False
        for rank, queue in enumerate(queues):
            while positions[rank] < len(queue):
                action = queue[positions[rank]]
                ready = _find_start(action, ends, rank_of, transfer)
                if ready is None:
                    break
                start, cost = max(free[rank], ready), seconds[action.kind][action.stage]
                free[rank] = end = start + cost
                busy[rank] += cost
                kind = "B" if action.kind == "I" else action.kind
                ends[kind][action.stage][action.microbatch] = end
                passes.append(Pass(rank, action.stage, action.kind, action.microbatch, start, end))
                positions[rank] += 1
                is_progressing = True
    if any(position < len(queue) for position, queue in zip(positions, queues, strict=True)):
        raise ValueError(f"the schedule {schedule!r} deadlocks")
    return Timeline(passes, max(free), busy)


def _find_start(action: Action, ends: Ends, rank_of: Sequence[int], transfer: float) -> float | None:
    """Return when a pass can start, as the passes before it have ended; None while one of them has not run."""
    stage, kind, microbatch = action
    if kind == "F":
        needed = [("F", stage - 1)] if stage else []
    elif kind == "W":
        needed = [("B", stage)]
    else:
        needed = [("F", stage), ("B", stage + 1)] if stage + 1 < len(rank_of) else [("F", stage)]
    latest = 0.0
    for needed_kind, needed_stage in needed:
        end = ends[needed_kind][needed_stage][microbatch]
        if end is None:
            return None
        latest = max(latest, end + transfer * (rank_of[needed_stage] != rank_of[stage]))
    return latest


@dataclass(frozen=True)
class RunningPass:
    """A pass that a rank runs, and the micro-batches of each stage of the model that wait meanwhile."""

    stage: int
    is_forward: bool
    is_first: bool
    """Whether no backward pass of the rank has run before."""
    is_last: bool
    """Whether no backward pass of the rank runs after it."""
    waiting: tuple[int, ...]
    """Those that wait for their backward pass."""
    half_done: tuple[int, ...]
    """Those that wait for the second half of a split backward pass."""


@lru_cache(maxsize=64)
def list_running_passes(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int
) -> Sequence[Sequence[RunningPass]]:
    """List the passes of each rank; of those that differ in their micro-batches alone, the ones with most waiting."""
    by_rank = []
    for queue in _order_passes(schedule, ranks, stages_per_rank, microbatches):
        waiting, half_done = [0] * ranks * stages_per_rank, [0] * ranks * stages_per_rank
        backward = [place for place, action in enumerate(queue) if action.kind in "BI"]
        fullest: dict[tuple[int, bool, bool, bool], list[tuple[int, ...]]] = {}
        for place, (stage, kind, _) in enumerate(queue):
            if kind == "W":
                half_done[stage] -= 1
                continue
            waiting[stage] -= kind != "F"
            key, counts = (stage, kind == "F", place <= backward[0], place >= backward[-1]), (*waiting, *half_done)
            vectors = fullest.get(key, [])
            if not any(_covers(vector, counts) for vector in vectors):
                fullest[key] = [*(vector for vector in vectors if not _covers(counts, vector)), counts]
            waiting[stage] += kind == "F"
            half_done[stage] += kind == "I"
        n = len(waiting)
        by_rank.append([RunningPass(*key, c[:n], c[n:]) for key, vectors in fullest.items() for c in vectors])
    return by_rank


def _covers(counts: Sequence[int], other: Sequence[int]) -> bool:
    return all(n >= m for n, m in zip(counts, other, strict=True))
