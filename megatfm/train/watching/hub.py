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
"""Longest message: whoever sends more is not one of us."""


class JsonConnection:
    """One end of a connection that carries JSON objects, one a line. Never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """The socket's descriptor, by which a selector waits for the connection."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send, or drop: a peer whose buffer is full, or who is gone, is found out by its silence."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(message).encode() + b"\n")

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

    def hang_up(self) -> None:
        """Say no more, and wake whoever waits for more. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back at once, whatever is still unread."""
        self.connection.close()


class Hub(threading.Thread):
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
        self._selector = selectors.DefaultSelector()
        if listener:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def add(self, connection: socket.socket) -> None:
        """Take in a connection. Before the start, or from the hub's own thread."""
        line = JsonConnection(connection)
        self._lines[line] = None
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
                detector.was_stopped(now - last)
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self.add(self._listener.accept()[0])
                elif isinstance(key.fileobj, JsonConnection):
                    self._hear(key.fileobj, detector, now)
            if now >= next_heartbeat:
                next_heartbeat = now + self._interval
                self._tell({"heartbeat": True})
            diagnosis = detector.diagnose(now)
        diagnosis = diagnosis or detector.diagnose(time.monotonic())
        self._tell({"diagnosis": diagnosis.plain()} if diagnosis else {"bye": True})
        self._close()

    def _hear(self, line: JsonConnection, detector: HangDetector, now: float) -> None:
        messages = line.receive()
        rank = self._lines[line]
        for message in messages or ():
            if rank is None:
                shown = str(message.get("token", ""))
                if not hmac.compare_digest(shown.encode(), self._token.encode()):
                    messages = None  # a port scanner, or another run: nobody of ours
                    break
                rank = self._lines[line] = int(message["rank"])
            elif "heartbeat" in message:
                detector.hears(rank, Heartbeat(**message["heartbeat"]), now)
            elif "failed" in message:
                detector.fails(rank, message["failed"], now, message["lost_peer"])
            elif "bye" in message:
                detector.leaves(rank)
        if messages is None:
            if rank is not None:
                detector.fails(rank, None, now)
            self._selector.unregister(line)
            line.close()
            del self._lines[line]

    def _tell(self, message: dict[str, Any]) -> None:
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
