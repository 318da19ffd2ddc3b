"""The hang detector: decides from the ranks' heartbeats and exits which ranks caused a hang or a failure.

It uses neither torch nor sockets nor clocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Self

from megatfm.terminal import join_first

CAUSE_WINDOW_SECONDS = 0.5
"""How long to wait after the first failure report: ranks that lost a peer may report before the rank that failed."""
ENDED_SILENTLY = "ended without an error message: it was killed, or it crashed"


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, sent every few seconds and at each change of phase.

    ticks: number of calls of `RankMonitor.tick`, which all ranks make in the same order. age: seconds since the last
    progress. waiting: whether the main thread is inside a collective, and so waits for others. location: the
    line of megatfm that it executes.
    """

    step: int = 0
    phase: str = "start"
    ticks: int = 0
    age: float = 0.0
    waiting: bool = False
    location: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Cause of a run's end: the ranks to blame (none if all failed alike), their hosts, and a message.

    hung: True for a hang, False for a failure. reporter: rank that records the diagnosis. refused: whether the cause is
    an invalid request (UsageError).
    """

    ranks: list[int]
    hosts: list[str]
    step: int
    text: str
    hung: bool
    reporter: int = 0
    refused: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a diagnosis from the result of `to_dict`. Raises TypeError for unknown keys."""
        ranks = [rank for first, count in values["ranks"] for rank in range(first, first + count)]
        hosts = [host for host, count in values["hosts"] for _ in range(count)]
        return cls(**{**values, "ranks": ranks, "hosts": hosts})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON's types. Ranks and hosts are run-length encoded, since there may be thousands."""
        return {**asdict(self), "ranks": _encode_ranges(self.ranks), "hosts": _encode_runs(self.hosts)}


def _encode_ranges(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Encode ranks as ranges of consecutive ones: (first rank, count)."""
    starts = [rank - index for index, rank in enumerate(ranks)]  # equal within a range
    ranges, index = [], 0
    for _, count in _encode_runs(starts):
        ranges.append((ranks[index], count))
        index += count
    return ranges


def _encode_runs(items: Iterable[Any]) -> list[tuple[Any, int]]:
    """Run-length encode items: (item, number of equal neighbours)."""
    return [(item, len(list(equal))) for item, equal in groupby(items)]


@dataclass(eq=False)
class _Rank:
    """The detector's knowledge of one rank."""

    rank: int
    name: str
    host: str
    last_heartbeat_at: float
    heartbeat: Heartbeat = Heartbeat()
    exited: bool = False
    failed_at: float | None = None  # time at which it failed, or its connection broke
    reason: str | None = None  # its error; None if only its connection broke
    lost_peer: bool = False
    refused: bool = False

    @property
    def gone(self) -> bool:
        """Whether the rank has exited or failed."""
        return self.exited or self.failed_at is not None

    @property
    def vanished(self) -> bool:
        return self.failed_at is not None and self.reason is None

    def seconds_without_progress(self, now: float) -> float:
        return self.heartbeat.age + now - self.last_heartbeat_at

    def describe(self) -> str:
        return f"{self.name} at step {self.heartbeat.step}, {self.heartbeat.phase}"


@dataclass
class HangDetector:
    """Records the heartbeats and exits of all ranks, and decides which ranks are to blame.

    hosts: host of each rank. hang_timeout: seconds without progress after which a rank counts as hung.
    heartbeat_timeout: seconds without a heartbeat after which a rank counts as silent once a rank hangs. relays: for
    each rank, the rank that forwards its messages (default: itself). All times are those of the caller's clock.
    """

    hosts: Sequence[str]
    hang_timeout: float
    heartbeat_timeout: float
    start: float
    relays: Sequence[int] | None = None
    _ranks: list[_Rank] = field(init=False)
    _n_gone: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._ranks = [_Rank(n, f"rank {n} on {host}", host, self.start) for n, host in enumerate(self.hosts)]

    def record_heartbeat(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Record a rank's heartbeat; now: seconds by the caller's clock."""
        self._ranks[rank].heartbeat, self._ranks[rank].last_heartbeat_at = heartbeat, now

    def record_exit(self, rank: int) -> None:
        """Record that a rank is done and exits."""
        record = self._ranks[rank]
        self._n_gone += not record.gone
        record.exited = True

    def record_failure(
        self, rank: int, reason: str | None, now: float, lost_peer: bool = False, refused: bool = False
    ) -> None:
        """Record that a rank raised an error, or (reason None) that its connection broke.

        lost_peer: whether its error only reports that another rank is gone. refused: whether it is a UsageError.
        """
        record = self._ranks[rank]
        if not record.gone:
            self._n_gone += 1
            record.failed_at, record.reason, record.lost_peer, record.refused = now, reason, lost_peer, refused

    def exclude_pause(self, seconds: float) -> None:
        """Discount seconds during which the detector's own process was paused, so that no rank is blamed for them."""
        for rank in self._ranks:
            rank.last_heartbeat_at += seconds

    @property
    def all_gone(self) -> bool:
        """Whether every rank has exited or failed."""
        return self._n_gone == len(self._ranks)

    def diagnose(self, now: float) -> Diagnosis | None:
        """Return the diagnosis once the cause of a hang or failure is known; None before, and while all is well."""
        ended = sorted((r for r in self._ranks if r.failed_at is not None), key=lambda r: r.failed_at or 0.0)
        if ended:
            if now - (ended[0].failed_at or 0.0) < CAUSE_WINDOW_SECONDS and not self.all_gone:
                return None
            return self._diagnose_failures(ended, now)
        if any(
            rank.seconds_without_progress(now) > self.hang_timeout for rank in self._list_active_ranks()
        ) and not self._is_slowest_making_progress(now):
            return self._diagnose_hang(now)
        return None

    def _is_slowest_making_progress(self, now: float) -> bool:
        """Return whether a rank for which others may wait makes progress, for example while it reads a checkpoint."""
        active = self._list_active_ranks()
        min_ticks = min(rank.heartbeat.ticks for rank in active)
        return any(
            rank.heartbeat.ticks == min_ticks
            and not rank.heartbeat.waiting
            and rank.seconds_without_progress(now) <= self.hang_timeout
            for rank in active
        )

    def _diagnose_failures(self, ended: list[_Rank], now: float) -> Diagnosis:
        causes = [rank for rank in ended if not rank.lost_peer]
        if not causes and self._list_active_ranks():  # these only lost a peer: a rank that hasn't ended
            return self._diagnose_hang(now)
        first = (causes or ended)[0]
        all_failed_alike = len(causes) == len(self._ranks) > 1 and len({rank.reason for rank in causes}) == 1
        if all_failed_alike and first.reason:
            return Diagnosis([], [], first.heartbeat.step, first.reason, hung=False, refused=first.refused)
        cause = f"failed: {first.reason}" if first.reason else ENDED_SILENTLY
        diagnosis = self._make_diagnosis([first], f"{first.describe()}: {cause}", hung=False)
        return replace(diagnosis, refused=first.refused)

    def _diagnose_hang(self, now: float) -> Diagnosis:
        active = self._list_active_ranks()
        silent = self._find_silent_ranks(active, now)
        min_ticks = min(rank.heartbeat.ticks for rank in active)
        behind = [rank for rank in active if rank.heartbeat.ticks == min_ticks]
        not_waiting = [rank for rank in behind if not rank.heartbeat.waiting]
        blamed = silent or not_waiting or behind
        seconds = max(rank.seconds_without_progress(now) for rank in blamed)
        if silent:
            reason = f"no sign of life for {seconds:.0f} s: it was stopped, or its machine is gone"
        else:
            location = f" ({blamed[0].heartbeat.location})" if blamed[0].heartbeat.location else ""
            reason = f"has made no progress for {seconds:.0f} s{location}; its stack is in the log of the rank"
        ranks_text = join_first([rank.describe() for rank in blamed], 8)
        return self._make_diagnosis(blamed, f"{ranks_text}: {reason}", hung=True)

    def _find_silent_ranks(self, active: Sequence[_Rank], now: float) -> list[_Rank]:
        """Return the ranks without recent heartbeats, except those whose relay is itself silent."""
        silent = [rank for rank in active if now - rank.last_heartbeat_at > self.heartbeat_timeout]
        silent_ranks = {rank.rank for rank in silent}
        relays = self.relays or range(len(self._ranks))
        return [rank for rank in silent if (relay := relays[rank.rank]) == rank.rank or relay not in silent_ranks]

    def _list_active_ranks(self) -> list[_Rank]:
        return [rank for rank in self._ranks if not rank.gone]

    def _make_diagnosis(self, blamed: list[_Rank], text: str, hung: bool) -> Diagnosis:
        blamed_ranks = [rank.rank for rank in blamed]
        hung_ranks = set(blamed_ranks) if hung else set()
        reporters = (rank.rank for rank in self._ranks if not (rank.exited or rank.vanished or rank.rank in hung_ranks))
        hosts = [rank.host for rank in blamed]
        return Diagnosis(blamed_ranks, hosts, blamed[0].heartbeat.step, text, hung, next(reporters, 0))
