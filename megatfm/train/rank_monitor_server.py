"""The rank monitor's server: a thread of rank 0 that receives every rank's heartbeats over TCP, decides which rank is
to blame when a run stands still or falls apart, and broadcasts that diagnosis.

Nothing here touches torch, so that a collective that hangs can't silence it.
"""

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
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
    """Record every rank's heartbeats and ends, and decide which ranks are to blame.

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
        silent = [rank for rank in active if now - rank.last_heartbeat_at > self.heartbeat_timeout]
        least = min(rank.heartbeat.ticks for rank in active)
        behind = [rank for rank in active if rank.heartbeat.ticks == least]
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
        return self._blame(blamed, f"{who}{more}: {what}", hung=True)

    def _active_ranks(self) -> list[_Rank]:
        return [rank for rank in self._ranks if not rank.exited and rank.failed_at is None]

    def _blame(self, blamed: list[_Rank], text: str, hung: bool) -> Diagnosis:
        numbers = [self._ranks.index(rank) for rank in blamed]
        reporters = [
            n
            for n, rank in enumerate(self._ranks)
            if not (rank.exited or rank.vanished or (hung and n in numbers))
        ]
        hosts = [rank.host for rank in blamed]
        return Diagnosis(
            numbers, hosts, blamed[0].heartbeat.step, text, hung, reporters[0] if reporters else 0
        )


# ------------------------------------------------------------------------------------------------ the server

LINE_BYTES = 64 * 1024
"""Longest message: a peer that sends more is not one of us."""
TOKEN_SECONDS = 10.0
"""How long a connection may take to show the token."""
STRANGERS = 16
"""Connections without a token that are kept at once, besides one for each rank."""


class JsonConnection:
    """One end of a connection that carries JSON objects, one a line. Never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._unread = self._unsent = b""

    def fileno(self) -> int:
        """The socket's descriptor, by which a selector waits for the connection."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it whole: a peer whose buffer is full, or that is gone, is found out by silence."""
        with contextlib.suppress(OSError):
            if self._unsent:  # the end of a message, without which the next would be glued to its beginning
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            if not self._unsent:
                line = json.dumps(message).encode() + b"\n"
                self._unsent = line[self.connection.send(line) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages since the last call, or None when the other end is closed (or talks nonsense)."""
        try:
            data = self.connection.recv(LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > LINE_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def shutdown(self) -> None:
        """Stop sending, and wake the peer that waits for more. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back at once, whatever is still unread."""
        self.connection.close()


class RankMonitorServer(threading.Thread):
    """Receive until every rank has left, or until the diagnosis is broadcast.

    hosts: by rank. hang_timeout: seconds that count as a hang. heartbeat_interval: seconds between heartbeats. token:
    what a rank must show."""

    def __init__(
        self,
        hosts: Sequence[str],
        hang_timeout: float,
        heartbeat_interval: float,
        token: str,
        listener: socket.socket | None,
    ) -> None:
        super().__init__(name="megatfm-rank-monitor", daemon=True)
        self._hosts, self._hang_timeout, self._heartbeat_interval, self._token = (
            hosts,
            hang_timeout,
            heartbeat_interval,
            token,
        )
        self._listener = listener
        self._connections: dict[JsonConnection, int | None] = {}  # → rank, once it has said who it is
        self._unidentified: dict[JsonConnection, float] = {}  # those that haven't: when they came
        self._selector = selectors.DefaultSelector()
        if listener:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def add(self, endpoint: socket.socket) -> None:
        """Add a connection, before the start or in the server's thread."""
        connection = JsonConnection(endpoint)
        self._connections[connection] = None
        self._unidentified[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Exchange heartbeats, and broadcast the diagnosis if there is one; the thread's work."""
        last = time.monotonic()
        detector = HangDetector(self._hosts, self._hang_timeout, max(4 * self._heartbeat_interval, 1.0), last)
        next_heartbeat = last
        diagnosis: Diagnosis | None = None
        while not detector.all_gone and diagnosis is None:
            ready = self._selector.select(min(self._heartbeat_interval / 4, 0.2))
            now = time.monotonic()
            if now - last > 2 * self._heartbeat_interval + 1:
                detector.exclude_pause(now - last)
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self.add(self._listener.accept()[0])
                elif isinstance(key.fileobj, JsonConnection):
                    self._receive(key.fileobj, detector, now)
            self._drop_strangers(now)
            if now >= next_heartbeat:
                next_heartbeat = now + self._heartbeat_interval
                self._broadcast({"heartbeat": True})
            diagnosis = detector.diagnose(now)
        diagnosis = diagnosis or detector.diagnose(time.monotonic())
        self._broadcast({"diagnosis": diagnosis.to_dict()} if diagnosis else {"bye": True})
        self._close()

    def _receive(self, connection: JsonConnection, detector: HangDetector, now: float) -> None:
        messages = connection.receive()
        try:
            for message in messages or ():
                self._handle(connection, message, detector, now)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ):  # none of ours: a port scanner, or another run
            messages = None
        if messages is None:
            if (rank := self._connections[connection]) is not None:
                detector.record_failure(rank, None, now)
            self._drop(connection)

    def _handle(
        self, connection: JsonConnection, message: dict[str, Any], detector: HangDetector, now: float
    ) -> None:
        """Act on one message. Raises ValueError, TypeError or KeyError for one that no rank of ours sends."""
        rank = self._connections[connection]
        if rank is None:
            token = str(message.get("token", "")).encode(errors="replace")
            number = message.get("rank")
            known = hmac.compare_digest(token, self._token.encode())
            if not known or type(number) is not int or not 0 <= number < len(self._hosts):
                raise ValueError("no rank of this run")
            self._connections[connection] = number
            del self._unidentified[connection]
        elif "heartbeat" in message:
            detector.record_heartbeat(rank, Heartbeat(**message["heartbeat"]), now)
        elif "failed" in message:
            detector.record_failure(rank, message["failed"], now, message["lost_peer"])
        elif "bye" in message:
            detector.record_exit(rank)

    def _drop_strangers(self, now: float) -> None:
        """Close connections that have shown no token in time, and the oldest of too many."""
        kept = len(self._hosts) + STRANGERS - (len(self._connections) - len(self._unidentified))
        late = [connection for connection, since in self._unidentified.items() if now - since > TOKEN_SECONDS]
        for connection in {*late, *list(self._unidentified)[: max(0, len(self._unidentified) - kept)]}:
            self._drop(connection)

    def _drop(self, connection: JsonConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._connections[connection]
        self._unidentified.pop(connection, None)

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Send to all ranks, our own last: its process may end as soon as it knows."""
        for connection, rank in sorted(
            self._connections.items(), key=lambda item: item[1] or 0, reverse=True
        ):
            if rank is not None:
                connection.send(message)

    def _close(self) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.close()
        if self._listener:
            self._listener.close()
