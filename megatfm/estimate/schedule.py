"""A pipeline's step, simulated: each rank runs the real schedule's passes, which take as long as their stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatfm.parallel.pipeline_schedule import Action, Kind, build_schedule


@dataclass(frozen=True)
class Pass:
    """A pass of a micro-batch through a stage, with its time."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. busy: seconds of each rank's passes. held: most micro-batches of each stage between their two
    passes."""

    passes: Sequence[Pass]
    seconds: float
    busy: Sequence[float]
    held: Mapping[int, int]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate(
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    rank_of: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
    transfer: float,
) -> Timeline:
    """Simulate a step. seconds: "F", "B", "I", "W" → time of each stage. transfer: between stages on two ranks."""
    queues = [list(order) for order in build_schedule(schedule, ranks, stages_per_rank, microbatches)]
    places, free, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    ends: dict[tuple[int, str, int], float] = {}
    passes: list[Pass] = []
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while places[rank] < len(queue):
                action = queue[places[rank]]
                ready = _ready(action, ends, rank_of, transfer)
                if ready is None:
                    break
                start, cost = max(free[rank], ready), seconds[action.kind][action.stage]
                free[rank] = end = start + cost
                busy[rank] += cost
                kind = "B" if action.kind == "I" else action.kind
                ends[action.stage, kind, action.microbatch] = end
                passes.append(Pass(rank, action.stage, action.kind, action.microbatch, start, end))
                places[rank] += 1
                moved = True
    if any(place < len(queue) for place, queue in zip(places, queues, strict=True)):
        raise ValueError(f"the order of {schedule!r} waits for ever")
    return Timeline(passes, max(free), busy, in_flight(queues))


def _ready(
    action: Action, ends: Mapping[tuple[int, str, int], float], rank_of: Sequence[int], transfer: float
) -> float | None:
    """Return when what a pass needs is there; None while it is not known."""
    stage, kind, i = action
    needs: list[tuple[int, str, int]] = []
    if kind == "F":
        needs = [(stage - 1, "F", i)] if stage else []
    elif kind == "W":
        needs = [(stage, "B", i)]
    else:
        needs = [(stage, "F", i), *([(stage + 1, "B", i)] if stage + 1 < len(rank_of) else [])]
    latest = 0.0
    for need in needs:
        if need not in ends:
            return None
        latest = max(latest, ends[need] + transfer * (rank_of[need[0]] != rank_of[stage]))
    return latest


def in_flight(queues: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Return the most micro-batches that each stage holds when its rank holds most."""
    most: dict[int, int] = {}
    for queue in queues:
        now: dict[int, int] = {}
        fullest, total = dict[int, int](), -1
        for action in queue:
            step = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            now[action.stage] = now.get(action.stage, 0) + step
            if step > 0 and sum(now.values()) > total:
                fullest, total = dict(now), sum(now.values())
        most |= fullest
    return most
