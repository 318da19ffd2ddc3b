"""Rank 0's ear: a thread that hears every rank over a socket of its own, and tells all of them the diagnosis.

Nothing here touches torch, so that a collective that hangs can't silence it.
"""

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from megatfm.train.watching.hang_detector import Diagnosis, HangDetector, Heartbeat

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
        """What has come since, or None when the other end is closed (or talks nonsense)."""
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
        """Say no more, and wake whoever waits for more. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back at once, whatever is still unread."""
        self.connection.close()


class RankMonitorServer(threading.Thread):
    """Listens until everybody has left, or until the diagnosis is told.

    hosts: by rank. limit, interval: seconds that count as a hang, and between heartbeats. token: what a rank must show.
    """

    def __init__(
        self, hosts: Sequence[str], limit: float, interval: float, token: str, listener: socket.socket | None
    ) -> None:
        super().__init__(name="megatfm-hub", daemon=True)
        self._hosts, self._limit, self._interval, self._token = hosts, limit, interval, token
        self._listener = listener
        self._lines: dict[JsonConnection, int | None] = {}  # → rank, once it has said who it is
        self._since: dict[JsonConnection, float] = {}  # those that haven't: when they came
        self._selector = selectors.DefaultSelector()
        if listener:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def add(self, connection: socket.socket) -> None:
        """Take in a connection. Before the start, or from the hub's own thread."""
        line = JsonConnection(connection)
        self._lines[line] = None
        self._since[line] = time.monotonic()
        self._selector.register(line, selectors.EVENT_READ)

    def run(self) -> None:
        """Hear and tell heartbeats, and at last the diagnosis, if there is one; the thread's own work."""
        last = time.monotonic()
        detector = HangDetector(self._hosts, self._limit, max(4 * self._interval, 1.0), last)
        next_heartbeat = last
        diagnosis: Diagnosis | None = None
        while not detector.all_gone and diagnosis is None:
            ready = self._selector.select(min(self._interval / 4, 0.2))
            now = time.monotonic()
            if now - last > 2 * self._interval + 1:
                detector.exclude_pause(now - last)
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self.add(self._listener.accept()[0])
                elif isinstance(key.fileobj, JsonConnection):
                    self._hear(key.fileobj, detector, now)
            self._drop_strangers(now)
            if now >= next_heartbeat:
                next_heartbeat = now + self._interval
                self._broadcast({"heartbeat": True})
            diagnosis = detector.diagnose(now)
        diagnosis = diagnosis or detector.diagnose(time.monotonic())
        self._broadcast({"diagnosis": diagnosis.plain()} if diagnosis else {"bye": True})
        self._close()

    def _hear(self, line: JsonConnection, detector: HangDetector, now: float) -> None:
        messages = line.receive()
        try:
            for message in messages or ():
                self._take(line, message, detector, now)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ):  # none of ours: a port scanner, or another run
            messages = None
        if messages is None:
            if (rank := self._lines[line]) is not None:
                detector.record_failure(rank, None, now)
            self._drop(line)

    def _take(
        self, line: JsonConnection, message: dict[str, Any], detector: HangDetector, now: float
    ) -> None:
        """Act on one message. Raises ValueError, TypeError or KeyError for one that no rank of ours sends."""
        rank = self._lines[line]
        if rank is None:
            token = str(message.get("token", "")).encode(errors="replace")
            number = message.get("rank")
            known = hmac.compare_digest(token, self._token.encode())
            if not known or type(number) is not int or not 0 <= number < len(self._hosts):
                raise ValueError("no rank of this run")
            self._lines[line] = number
            del self._since[line]
        elif "heartbeat" in message:
            detector.record_heartbeat(rank, Heartbeat(**message["heartbeat"]), now)
        elif "failed" in message:
            detector.record_failure(rank, message["failed"], now, message["lost_peer"])
        elif "bye" in message:
            detector.record_exit(rank)

    def _drop_strangers(self, now: float) -> None:
        """Close connections that have shown no token in time, and the oldest of too many."""
        kept = len(self._hosts) + STRANGERS - (len(self._lines) - len(self._since))
        late = [line for line, since in self._since.items() if now - since > TOKEN_SECONDS]
        for line in {*late, *list(self._since)[: max(0, len(self._since) - kept)]}:
            self._drop(line)

    def _drop(self, line: JsonConnection) -> None:
        self._selector.unregister(line)
        line.close()
        del self._lines[line]
        self._since.pop(line, None)

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Tell all ranks, our own last: its process may end as soon as it knows."""
        for line, rank in sorted(self._lines.items(), key=lambda item: item[1] or 0, reverse=True):
            if rank is not None:
                line.send(message)

    def _close(self) -> None:
        self._selector.close()
        for line in self._lines:
            line.close()
        if self._listener:
            self._listener.close()
