"""The rank monitor's server: a thread of rank 0 that receives every rank's heartbeats over TCP and broadcasts the
diagnosis when a run stands still or falls apart; and the relay, a thread of one rank on every other node.

Ranks of a node talk to its relay, so that rank 0 holds one connection a node. Nothing here touches torch, so that a
collective that hangs can't silence it, nor logging, whose lock a stuck main thread may hold.
"""

import errno
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from megatfm.files import raise_descriptor_limit
from megatfm.train.hang_detector import HangDetector, Heartbeat
from megatfm.train.json_connection import LINE_BYTES, MESSAGE_BYTES, JsonConnection, Message

TOKEN_SECONDS = 10.0
"""How long a connection may take to show the token."""
STRANGERS = 16
"""Connections without a token that are kept at once, besides one for each rank."""
LAST_MESSAGE_SECONDS = 5.0
"""How long the last message may take to be sent to all, and to be read by them."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Until connections are accepted again after one could not be."""
LOOK_SECONDS = 0.05
"""Between looks for a diagnosis."""
UNHEARD_SECONDS = 30.0
"""After which ranks that were never heard are named."""

Warn = Callable[[str], None]


class _Hub(threading.Thread):
    """Accepts connections of ranks, each of which says first which rank it is and shows the token."""

    def __init__(
        self, name: str, ranks: Collection[int], token: str, listener: socket.socket | None, warn: Warn
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._expected, self._token, self._listener, self._warn = ranks, token, listener, warn
        self._connections: dict[JsonConnection, int | None] = {}  # → rank, once it has said who it is
        self._unidentified: dict[JsonConnection, float] = {}  # those that haven't: when they came
        self._selector = selectors.DefaultSelector()
        self._accepts_again: float | None = None
        if listener:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if missing := raise_descriptor_limit(len(ranks) + STRANGERS):
            warn(
                f"this machine lets a process open {missing} files and sockets too few for {len(ranks)} connections of "
                "the rank monitor: ranks may go unheard; raise the hard limit (ulimit -Hn, or LimitNOFILE of slurmd)"
            )

    def add(self, endpoint: socket.socket) -> None:
        """Add a connection, before the start or in the hub's thread."""
        connection = JsonConnection(endpoint, LINE_BYTES)
        self._connections[connection] = None
        self._unidentified[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self, now: float) -> None:
        """Accept a connection. Where none can be opened, say so and pause: the ones that wait are accepted later."""
        assert self._listener is not None
        try:
            self.add(self._listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                if self._accepts_again is None:
                    self._warn(
                        f"the rank monitor can't accept a connection ({error.strerror}): it has {self._n_identified} "
                        f"of {len(self._expected)}; ranks that it does not hear can't be told from ranks that hang"
                    )
                self._selector.unregister(self._listener)
                self._accepts_again = now + ACCEPT_PAUSE_SECONDS

    def _accept_again(self, now: float) -> None:
        if self._accepts_again and now > self._accepts_again and self._listener:
            if self._listener not in self._selector.get_map():
                self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepts_again = now + ACCEPT_PAUSE_SECONDS

    @property
    def _n_identified(self) -> int:
        return len(self._connections) - len(self._unidentified)

    def _identify(self, connection: JsonConnection, message: Message) -> None:
        """Take down who a connection is. Raises ValueError for one that is no rank of ours."""
        token = str(message.get("token", "")).encode(errors="replace")
        rank = message.get("rank")
        known = hmac.compare_digest(token, self._token.encode())
        if not known or type(rank) is not int or rank not in self._expected:
            raise ValueError("no rank of this run")
        self._connections[connection] = rank
        connection.line_bytes = MESSAGE_BYTES
        del self._unidentified[connection]

    def _drop_strangers(self, now: float) -> None:
        """Close connections that have shown no token in time, and the oldest of too many."""
        most = len(self._expected) + STRANGERS - self._n_identified
        late = [connection for connection, since in self._unidentified.items() if now - since > TOKEN_SECONDS]
        for connection in {*late, *list(self._unidentified)[: max(0, len(self._unidentified) - most)]}:
            self._drop(connection)

    def _drop(self, connection: JsonConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._connections[connection]
        self._unidentified.pop(connection, None)

    def _identified(self) -> list[JsonConnection]:
        """Connections of ranks, our own process's last: it may end as soon as it knows."""
        known = [(rank, connection) for connection, rank in self._connections.items() if rank is not None]
        return [connection for _, connection in sorted(known, key=lambda item: item[0], reverse=True)]

    def _broadcast(self, message: Message) -> None:
        for connection in self._identified():
            connection.send(message)

    def _broadcast_last(self, message: Message) -> None:
        deadline = time.monotonic() + LAST_MESSAGE_SECONDS
        for connection in self._identified():
            connection.send_last(message, deadline)

    def _close(self) -> None:
        """Close all, once the others have: TCP drops what was sent last where its sender closes with bytes unread."""
        deadline = time.monotonic() + LAST_MESSAGE_SECONDS
        for connection in self._connections:
            connection.shutdown(socket.SHUT_WR)
        while self._connections and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(seconds):
                if key.fileobj is self._listener:
                    self._selector.unregister(self._listener)
                elif isinstance(key.fileobj, JsonConnection) and key.fileobj.receive() is None:
                    self._drop(key.fileobj)
        self._selector.close()
        for connection in self._connections:
            connection.close()
        if self._listener:
            self._listener.close()


class RankMonitorServer(_Hub):
    """Receive until every rank has left, or until the diagnosis is broadcast.

    hosts: by rank. hang_timeout: seconds that count as a hang. heartbeat_interval: seconds between heartbeats. token:
    what a rank must show. relays: by rank, the rank through which it is heard (not given: itself)."""

    def __init__(
        self,
        hosts: Sequence[str],
        hang_timeout: float,
        heartbeat_interval: float,
        token: str,
        listener: socket.socket | None,
        relays: Sequence[int] | None = None,
        warn: Warn = lambda text: None,
    ) -> None:
        self._relays = relays or range(len(hosts))
        super().__init__("megatfm-rank-monitor", set(self._relays), token, listener, warn)
        self._heartbeat_interval = heartbeat_interval
        self._unheard = set(range(len(hosts)))
        now = time.monotonic()
        self._detector = HangDetector(
            hosts, hang_timeout, max(4 * heartbeat_interval, 1.0), now, self._relays
        )

    def run(self) -> None:
        """Exchange heartbeats, and broadcast the diagnosis if there is one; the thread's work."""
        detector, interval = self._detector, self._heartbeat_interval
        start = last = next_heartbeat = next_look = time.monotonic()
        diagnosis, is_over, names_unheard = None, False, False
        while not is_over:
            ready = self._selector.select(min(interval / 4, 0.2))
            now = time.monotonic()
            if now - last > 2 * interval + 1:
                detector.exclude_pause(now - last)
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept(now)
                elif isinstance(key.fileobj, JsonConnection):
                    self._receive(key.fileobj, now)
            self._accept_again(now)
            self._drop_strangers(now)
            if not names_unheard and now > start + max(UNHEARD_SECONDS, 4 * interval):
                names_unheard = True
                self._warn_of_unheard()
            if now >= next_heartbeat:
                next_heartbeat = now + interval
                self._broadcast({"heartbeat": True})
            if now >= next_look:  # it goes through all ranks, so not after each message
                next_look = now + LOOK_SECONDS
                diagnosis = detector.diagnose(now)
                is_over = diagnosis is not None or detector.all_gone
        diagnosis = diagnosis or detector.diagnose(time.monotonic())
        self._broadcast_last({"diagnosis": diagnosis.to_dict()} if diagnosis else {"bye": True})
        self._close()

    def _warn_of_unheard(self) -> None:
        """Name the ranks of which nothing was heard."""
        if unheard := sorted(self._unheard):
            names = ", ".join(map(str, unheard[:16])) + (" …" if len(unheard) > 16 else "")
            self._warn(
                f"the rank monitor has not heard {len(unheard)} of {len(self._relays)} ranks since the start: {names}"
            )

    def _receive(self, connection: JsonConnection, now: float) -> None:
        messages = connection.receive()
        try:
            for message in messages or ():
                self._handle(connection, message, now)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ):  # none of ours: a port scanner, or another run
            messages = None
        if messages is None:
            if (rank := self._connections[connection]) is not None:
                self._detector.record_failure(rank, None, now)
            self._drop(connection)

    def _handle(self, connection: JsonConnection, message: Message, now: float) -> None:
        """Act on one message. Raises ValueError, TypeError or KeyError for one that no rank of ours sends."""
        rank = self._connections[connection]
        if rank is None:
            self._identify(connection, message)
            return
        for sender, inner in message.get("relayed", [(rank, message)]):
            if self._relays[sender] != rank:
                raise ValueError(f"rank {rank} does not speak for rank {sender}")
            self._unheard.discard(sender)
            if "heartbeat" in inner:
                self._detector.record_heartbeat(sender, Heartbeat(**inner["heartbeat"]), now)
            elif "failed" in inner:
                self._detector.record_failure(sender, inner["failed"], now, inner["lost_peer"])
            elif "lost" in inner:
                self._detector.record_failure(sender, None, now)
            elif "bye" in inner:
                self._detector.record_exit(sender)


class RankMonitorRelay(_Hub):
    """Hand on what the ranks of a node say to the server, and what that says to them, until its last message.

    ranks: of this node. server: the connection to it. hang_timeout: seconds of its silence that count as its end.
    """

    def __init__(
        self,
        ranks: Collection[int],
        hang_timeout: float,
        heartbeat_interval: float,
        token: str,
        listener: socket.socket | None,
        server: JsonConnection,
        warn: Warn = lambda text: None,
    ) -> None:
        super().__init__("megatfm-rank-relay", set(ranks), token, listener, warn)
        self._hang_timeout, self._heartbeat_interval, self._server = hang_timeout, heartbeat_interval, server
        self._selector.register(server, selectors.EVENT_READ)
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}  # those to hand on, and when they came
        self._phases: dict[int, str] = {}  # that the server knows
        self._events: list[tuple[int, Message]] = []

    def run(self) -> None:
        """Hand messages on; the thread's work."""
        interval = self._heartbeat_interval
        heard = last = next_heartbeat = next_batch = time.monotonic()
        final: Message | None = None
        while final is None:
            ready = self._selector.select(min(interval / 4, 0.2))
            now = time.monotonic()
            if now - last > 2 * interval + 1:
                heard += now - last  # this process was stopped
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept(now)
                elif key.fileobj is self._server:
                    heard, final = now, final or self._receive_from_server()
                elif isinstance(key.fileobj, JsonConnection):
                    self._receive(key.fileobj, now)
            if final is None and now - heard > self._hang_timeout + 3 * interval:
                final = {"server_lost": f"no sign of life for {now - heard:.0f} s", "hung": True}
            self._accept_again(now)
            self._drop_strangers(now)
            if now >= next_heartbeat:
                next_heartbeat = now + interval
                self._broadcast({"heartbeat": True})
            if self._events or now >= next_batch or self._has_new_phase():
                next_batch = now + interval / 4
                self._hand_on(now)
        self._broadcast_last(final)
        self._selector.unregister(self._server)
        self._server.close()
        self._close()

    def _receive_from_server(self) -> Message | None:
        """Return the last message to hand on, if it has come, or the server is gone."""
        messages = self._server.receive()
        if messages is None:
            return {"server_lost": "ended without a word: it was killed, or it crashed", "hung": False}
        return next((message for message in messages if "heartbeat" not in message), None)

    def _receive(self, connection: JsonConnection, now: float) -> None:
        messages = connection.receive()
        try:
            for message in messages or ():
                rank = self._connections[connection]
                if rank is None:
                    self._identify(connection, message)
                elif "heartbeat" in message:
                    self._heartbeats[rank] = Heartbeat(**message["heartbeat"]), now
                else:
                    self._events.append((rank, message))
        except (ValueError, TypeError, KeyError, AttributeError):
            messages = None
        if messages is None:
            if (rank := self._connections[connection]) is not None:
                self._events.append((rank, {"lost": True}))
            self._drop(connection)

    def _has_new_phase(self) -> bool:
        """Return whether a rank is in another phase than the server knows: a sudden death is to be placed rightly."""
        return any(self._phases.get(rank) != sign.phase for rank, (sign, _) in self._heartbeats.items())

    def _hand_on(self, now: float) -> None:
        """Send all heartbeats and events as one message. What the server has no room for is sent later."""
        heartbeats = [
            (rank, {"heartbeat": replace(sign, age=sign.age + now - since).__dict__})
            for rank, (sign, since) in self._heartbeats.items()
        ]
        if (heartbeats or self._events) and self._server.send({"relayed": [*heartbeats, *self._events]}):
            self._phases.update({rank: sign.phase for rank, (sign, _) in self._heartbeats.items()})
            self._heartbeats, self._events = {}, []
