"""Who is to blame when a run stands still or falls apart: from what the ranks say of themselves, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

CAUSE_WINDOW_SECONDS = 0.5
"""After the first failure: the cause may be heard of later than the ranks that lost their peer by it."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself, every few seconds and at each change of phase.

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
    """Why the run ends: the ranks to blame (none, where all failed alike) with their hosts, and a line for people.

    reporter: the rank that writes it down.
    """

    ranks: list[int]
    hosts: list[str]
    step: int
    text: str
    hung: bool
    reporter: int = 0

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """The diagnosis that `plain` gave, from another process. Raises TypeError for other keys."""
        return cls(**values)

    def plain(self) -> dict[str, Any]:
        """Fields by name, as JSON takes them."""
        return asdict(self)


@dataclass
class _Rank:
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
    """Hears every rank's heartbeats and ends, and decides which ranks are to blame.

    hosts: by rank. hang_timeout: seconds without a move that count as a hang. heartbeat_timeout: seconds without a
    heartbeat that count as silence once somebody hangs. All times come from the caller's clock.
    """

    hosts: Sequence[str]
    hang_timeout: float
    heartbeat_timeout: float
    start: float
    _ranks: list[_Rank] = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = [_Rank(f"rank {n} on {host}", host, self.start) for n, host in enumerate(self.hosts)]

    def record_heartbeat(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Note a rank's heartbeat; now: seconds by the caller's clock."""
        self._ranks[rank].heartbeat, self._ranks[rank].last_heartbeat_at = heartbeat, now

    def record_exit(self, rank: int) -> None:
        """A rank has done its work and goes."""
        self._ranks[rank].exited = True

    def record_failure(self, rank: int, reason: str | None, now: float, lost_peer: bool = False) -> None:
        """A rank raised an error, or is gone without a word (no reason). lost_peer: it only lost touch with another."""
        seen = self._ranks[rank]
        if not seen.exited and seen.failed_at is None:
            seen.failed_at, seen.reason, seen.lost_peer = now, reason, lost_peer

    def exclude_pause(self, seconds: float) -> None:
        """The detector's own process could not listen for so long: nobody else is to blame for that."""
        for rank in self._ranks:
            rank.last_heartbeat_at += seconds

    @property
    def all_gone(self) -> bool:
        """Whether every rank has left, failed or been lost, so that none is to be waited for."""
        return all(rank.exited or rank.failed_at is not None for rank in self._ranks)

    def diagnose(self, now: float) -> Diagnosis | None:
        """Return why the run ends, once that is clear."""
        ended = sorted((r for r in self._ranks if r.failed_at is not None), key=lambda r: r.failed_at or 0.0)
        if ended:
            if now - (ended[0].failed_at or 0.0) < CAUSE_WINDOW_SECONDS and not self.all_gone:
                return None
            return self._of_failures(ended, now)
        if any(
            rank.seconds_without_progress(now) > self.hang_timeout for rank in self._active_ranks()
        ) and not self._waited_for(now):
            return self._of_a_hang(now)
        return None

    def _waited_for(self, now: float) -> bool:
        """Whether a rank that others may wait for still gets on, such as with reading a checkpoint."""
        here = self._active_ranks()
        least = min(rank.heartbeat.ticks for rank in here)
        return any(
            rank.heartbeat.ticks == least
            and not rank.heartbeat.waiting
            and rank.seconds_without_progress(now) <= self.hang_timeout
            for rank in here
        )

    def _of_failures(self, ended: list[_Rank], now: float) -> Diagnosis:
        causes = [rank for rank in ended if not rank.lost_peer]
        if not causes and self._active_ranks():  # they all waited for somebody in vain
            return self._of_a_hang(now)
        first = (causes or ended)[0]
        if (
            len(causes) == len(self._ranks) > 1
            and len({rank.reason for rank in causes}) == 1
            and first.reason
        ):
            return Diagnosis([], [], first.heartbeat.step, first.reason, hung=False)
        said = (
            f"failed: {first.reason}"
            if first.reason
            else "ended without a word: it was killed, or it crashed"
        )
        return self._name([first], f"{first.last_seen()}: {said}", hung=False)

    def _of_a_hang(self, now: float) -> Diagnosis:
        here = self._active_ranks()
        silent = [rank for rank in here if now - rank.last_heartbeat_at > self.heartbeat_timeout]
        least = min(rank.heartbeat.ticks for rank in here)
        behind = [rank for rank in here if rank.heartbeat.ticks == least]
        working = [rank for rank in behind if not rank.heartbeat.waiting]
        blamed = silent or working or behind
        seconds = max(rank.seconds_without_progress(now) for rank in blamed)
        if silent:
            what = f"no sign of life for {seconds:.0f} s: it was stopped, or its machine is gone"
        else:
            place = f" ({blamed[0].heartbeat.place})" if blamed[0].heartbeat.place else ""
            what = f"has not moved for {seconds:.0f} s{place}; its stack is in the log of the rank"
        who = ", ".join(rank.last_seen() for rank in blamed[:8])
        more = f" and {len(blamed) - 8} more" if len(blamed) > 8 else ""
        return self._name(blamed, f"{who}{more}: {what}", hung=True)

    def _active_ranks(self) -> list[_Rank]:
        return [rank for rank in self._ranks if not rank.exited and rank.failed_at is None]

    def _name(self, blamed: list[_Rank], text: str, hung: bool) -> Diagnosis:
        numbers = [self._ranks.index(rank) for rank in blamed]
        able = [
            n
            for n, rank in enumerate(self._ranks)
            if not (rank.exited or rank.vanished or (hung and n in numbers))
        ]
        hosts = [rank.host for rank in blamed]
        return Diagnosis(numbers, hosts, blamed[0].heartbeat.step, text, hung, able[0] if able else 0)
