"""The hang detector: decides from heartbeats and ends which ranks are to blame when a run stands still or falls apart.

Nothing here touches torch, sockets or clocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Self

CAUSE_WINDOW_SECONDS = 0.5
"""How long to wait after the first failure report: ranks that lost a peer may report before the rank that failed."""


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, sent every few seconds and at each change of phase.

    ticks: how often it has moved on, counted alike on all ranks. age: seconds since it last did. waiting: whether
    its main thread is inside a collective, and so waits for others. place: the line of megatfm where it is.
    """

    step: int = 0
    phase: str = "start"
    ticks: int = 0
    age: float = 0.0
    waiting: bool = False
    place: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Reason of a run's end: the ranks to blame (none, where all failed alike) with their hosts, and a line for people.

    reporter: the rank that writes it down.
    """

    ranks: list[int]
    hosts: list[str]
    step: int
    text: str
    hung: bool
    reporter: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the diagnosis that `to_dict` gave, from another process. Raises TypeError for other keys."""
        ranks = [rank for first, count in values["ranks"] for rank in range(first, first + count)]
        hosts = [host for host, count in values["hosts"] for _ in range(count)]
        return cls(**{**values, "ranks": ranks, "hosts": hosts})

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON takes them, short where neighbours among many ranks are blamed."""
        return {**asdict(self), "ranks": _runs_of_ranks(self.ranks), "hosts": _counted(self.hosts)}


def _runs_of_ranks(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, how many follow each other) of ranks."""
    starts = [rank - place for place, rank in enumerate(ranks)]
    runs, place = [], 0
    for _, count in _counted(starts):
        runs.append((ranks[place], count))
        place += count
    return runs


def _counted(items: Iterable[Any]) -> list[tuple[Any, int]]:
    """Equal neighbours counted."""
    return [(item, len(list(equal))) for item, equal in groupby(items)]


@dataclass(eq=False)
class _Rank:
    number: int
    name: str
    host: str
    last_heartbeat_at: float
    heartbeat: Heartbeat = Heartbeat()
    exited: bool = False
    failed_at: float | None = None  # when it failed, or was lost
    reason: str | None = None  # what it said, if it said anything
    lost_peer: bool = False

    @property
    def vanished(self) -> bool:
        return self.failed_at is not None and self.reason is None

    def seconds_without_progress(self, now: float) -> float:
        return self.heartbeat.age + now - self.last_heartbeat_at

    def last_seen(self) -> str:
        return f"{self.name} at step {self.heartbeat.step}, {self.heartbeat.phase}"


@dataclass
class HangDetector:
    """Record every rank's heartbeats and ends, and decide which ranks are to blame.

    hosts: by rank. hang_timeout: seconds without a move that count as a hang. heartbeat_timeout: seconds without a
    heartbeat that count as silence once somebody hangs. relays: by rank, the rank through which it is heard (not given:
    itself). All times come from the caller's clock.
    """

    hosts: Sequence[str]
    hang_timeout: float
    heartbeat_timeout: float
    start: float
    relays: Sequence[int] | None = None
    _ranks: list[_Rank] = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = [_Rank(n, f"rank {n} on {host}", host, self.start) for n, host in enumerate(self.hosts)]

    def record_heartbeat(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Note a rank's heartbeat; now: seconds by the caller's clock."""
        self._ranks[rank].heartbeat, self._ranks[rank].last_heartbeat_at = heartbeat, now

    def record_exit(self, rank: int) -> None:
        """Note that a rank has done its work and exits."""
        self._ranks[rank].exited = True

    def record_failure(self, rank: int, reason: str | None, now: float, lost_peer: bool = False) -> None:
        """Note that a rank raised an error, or is gone without a word (no reason). lost_peer: it only lost a peer."""
        seen = self._ranks[rank]
        if not seen.exited and seen.failed_at is None:
            seen.failed_at, seen.reason, seen.lost_peer = now, reason, lost_peer

    def exclude_pause(self, seconds: float) -> None:
        """Discount seconds in which the detector's own process could not listen: nobody else is to blame for them."""
        for rank in self._ranks:
            rank.last_heartbeat_at += seconds

    @property
    def all_gone(self) -> bool:
        """Return whether every rank has left, failed or been lost, so that none is to be waited for."""
        return all(rank.exited or rank.failed_at is not None for rank in self._ranks)

    def diagnose(self, now: float) -> Diagnosis | None:
        """Return why the run ends, once that is clear."""
        ended = sorted((r for r in self._ranks if r.failed_at is not None), key=lambda r: r.failed_at or 0.0)
        if ended:
            if now - (ended[0].failed_at or 0.0) < CAUSE_WINDOW_SECONDS and not self.all_gone:
                return None
            return self._diagnose_failures(ended, now)
        if any(
            rank.seconds_without_progress(now) > self.hang_timeout for rank in self._active_ranks()
        ) and not self._waited_for(now):
            return self._diagnose_hang(now)
        return None

    def _waited_for(self, now: float) -> bool:
        """Return whether a rank that others may wait for still gets on, such as with reading a checkpoint."""
        active = self._active_ranks()
        least = min(rank.heartbeat.ticks for rank in active)
        return any(
            rank.heartbeat.ticks == least
            and not rank.heartbeat.waiting
            and rank.seconds_without_progress(now) <= self.hang_timeout
            for rank in active
        )

    def _diagnose_failures(self, ended: list[_Rank], now: float) -> Diagnosis:
        causes = [rank for rank in ended if not rank.lost_peer]
        if not causes and self._active_ranks():  # they all waited for somebody in vain
            return self._diagnose_hang(now)
        first = (causes or ended)[0]
        if (
            len(causes) == len(self._ranks) > 1
            and len({rank.reason for rank in causes}) == 1
            and first.reason
        ):
            return Diagnosis([], [], first.heartbeat.step, first.reason, hung=False)
        end = (
            f"failed: {first.reason}"
            if first.reason
            else "ended without a word: it was killed, or it crashed"
        )
        return self._blame([first], f"{first.last_seen()}: {end}", hung=False)

    def _diagnose_hang(self, now: float) -> Diagnosis:
        active = self._active_ranks()
        silent = self._silent_ranks(active, now)
        least = min(rank.heartbeat.ticks for rank in active)
        behind = [rank for rank in active if rank.heartbeat.ticks == least]
        working = [rank for rank in behind if not rank.heartbeat.waiting]
        blamed = silent or working or behind
        seconds = max(rank.seconds_without_progress(now) for rank in blamed)
        if silent:
            reason = f"no sign of life for {seconds:.0f} s: it was stopped, or its machine is gone"
        else:
            place = f" ({blamed[0].heartbeat.place})" if blamed[0].heartbeat.place else ""
            reason = f"has not moved for {seconds:.0f} s{place}; its stack is in the log of the rank"
        who = ", ".join(rank.last_seen() for rank in blamed[:8])
        more = f" and {len(blamed) - 8} more" if len(blamed) > 8 else ""
        return self._blame(blamed, f"{who}{more}: {reason}", hung=True)

    def _silent_ranks(self, active: Sequence[_Rank], now: float) -> list[_Rank]:
        """Return the ranks that are not heard, without those that only their silent relay keeps from being heard."""
        silent = [rank for rank in active if now - rank.last_heartbeat_at > self.heartbeat_timeout]
        numbers = {rank.number for rank in silent}
        relays = self.relays or range(len(self._ranks))
        return [
            rank for rank in silent if (relay := relays[rank.number]) == rank.number or relay not in numbers
        ]

    def _active_ranks(self) -> list[_Rank]:
        return [rank for rank in self._ranks if not rank.exited and rank.failed_at is None]

    def _blame(self, blamed: list[_Rank], text: str, hung: bool) -> Diagnosis:
        numbers = [rank.number for rank in blamed]
        unable = set(numbers) if hung else set()
        able = (
            rank.number for rank in self._ranks if not (rank.exited or rank.vanished or rank.number in unable)
        )
        hosts = [rank.host for rank in blamed]
        return Diagnosis(numbers, hosts, blamed[0].heartbeat.step, text, hung, next(able, 0))
