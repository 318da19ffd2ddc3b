"""The rank monitor's server and relay.

The server is a thread of rank 0. It receives all heartbeats over TCP, and broadcasts the diagnosis when a run hangs or
fails. On every other node, the relay, a thread of one rank, forwards the messages of the node's ranks, so that rank 0
has one connection per node. This module uses neither torch, so that a hanging collective can't block it, nor logging,
whose lock a stuck main thread may hold.
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
from megatfm.train.hang_detector import ENDED_SILENTLY, HangDetector, Heartbeat
from megatfm.train.json_connection import LINE_BYTES, MESSAGE_BYTES, JsonConnection, Message

TOKEN_SECONDS = 10.0
"""Time within which a new connection must send the token."""
MAX_UNIDENTIFIED = 16
"""Largest number of unidentified connections beyond one for each rank that has not identified itself yet."""
LAST_MESSAGE_SECONDS = 5.0
"""Time within which the last message must be sent to all, and time within which they must read it."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a connection could not be accepted."""
DIAGNOSE_INTERVAL_SECONDS = 0.05
"""Time between two runs of the detector, which visits all ranks."""
FIRST_MESSAGE_SECONDS = 30.0
"""Time after which a warning names the ranks that have never sent a message."""

Warn = Callable[[str], None]


class _Hub(threading.Thread):
    """Accepts connections of ranks, and exchanges messages with them until the last one.

    Each must first send its rank and the token. A subclass defines how messages are handled, and when the last is due.
    """

    def __init__(
        self,
        name: str,
        ranks: Collection[int],
        heartbeat_interval: float,
        token: str,
        listener: socket.socket | None,
        warn: Warn,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._expected, self._heartbeat_interval = ranks, heartbeat_interval
        self._token, self._listener, self._warn = token, listener, warn
        self._connections: dict[JsonConnection, int | None] = {}  # → rank, once identified
        self._unidentified: dict[JsonConnection, float] = {}  # → time of arrival
        self._selector = selectors.DefaultSelector()
        self._accept_paused_until: float | None = None
        if listener:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if missing := raise_descriptor_limit(len(ranks) + MAX_UNIDENTIFIED):
            warn(
                f"the limit of open files and sockets is {missing} too low for {len(ranks)} connections of the rank "
                "monitor, which may miss ranks: raise the hard limit (ulimit -Hn, or LimitNOFILE of slurmd)"
            )

    def add(self, endpoint: socket.socket) -> None:
        """Add a connection. Only before the thread starts, or from within it."""
        connection = JsonConnection(endpoint, LINE_BYTES)
        self._connections[connection] = None
        self._unidentified[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Exchange messages until there is a last one, and broadcast it. Runs in the thread."""
        interval = self._heartbeat_interval
        last = next_heartbeat = time.monotonic()
        last_message: Message | None = None
        while last_message is None:
            ready = self._selector.select(min(interval / 4, 0.2))
            now = time.monotonic()
            if now - last > 2 * interval + 1:
                self._exclude_pause(now - last)
            last = now
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept(now)
                elif isinstance(key.fileobj, JsonConnection):
                    self._receive(key.fileobj, now)
            self._resume_accepting(now)
            self._drop_unidentified(now)
            if now >= next_heartbeat:
                next_heartbeat = now + interval
                self._broadcast({"heartbeat": True})
            last_message = self._advance(now)
        self._broadcast_last(last_message)
        self._close()

    def _receive(self, connection: JsonConnection, now: float) -> None:
        messages = connection.receive()
        try:
            for message in messages or ():
                if (rank := self._connections[connection]) is None:
                    self._identify(connection, message)
                else:
                    self._handle(rank, message, now)
        except (ValueError, TypeError, KeyError, AttributeError):  # a port scanner, or another run
            messages = None
        if messages is None:
            if (rank := self._connections[connection]) is not None:
                self._handle(rank, {"lost": True}, now)
            self._drop(connection)

    def _handle(self, rank: int, message: Message, now: float) -> None:
        """Handle a rank's message, or the end of its connection: {"lost": True}.

        Raises ValueError, TypeError or KeyError for a message that no rank of this run sends.
        """
        raise NotImplementedError

    def _exclude_pause(self, seconds: float) -> None:
        """Discount seconds during which this process was paused."""
        raise NotImplementedError

    def _advance(self, now: float) -> Message | None:
        """Do what is due after messages are handled. Returns the last message for the ranks, once there is one."""
        raise NotImplementedError

    def _accept(self, now: float) -> None:
        """Accept a connection. If no descriptor is free, warn and pause; waiting connections are accepted later."""
        assert self._listener is not None
        try:
            self.add(self._listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                if self._accept_paused_until is None:
                    self._warn(
                        f"the rank monitor can't accept a connection ({error.strerror}): {self._n_identified} of "
                        f"{len(self._expected)} ranks are connected; the others would seem to hang"
                    )
                self._selector.unregister(self._listener)
                self._accept_paused_until = now + ACCEPT_PAUSE_SECONDS

    def _resume_accepting(self, now: float) -> None:
        if self._accept_paused_until and now > self._accept_paused_until and self._listener:
            if self._listener not in self._selector.get_map():
                self._selector.register(self._listener, selectors.EVENT_READ)
            self._accept_paused_until = now + ACCEPT_PAUSE_SECONDS

    @property
    def _n_identified(self) -> int:
        return len(self._connections) - len(self._unidentified)

    def _identify(self, connection: JsonConnection, message: Message) -> None:
        """Record a connection's rank. Raises ValueError for a wrong token or an unexpected rank."""
        token = str(message.get("token", "")).encode(errors="replace")
        rank = message.get("rank")
        is_token_valid = hmac.compare_digest(token, self._token.encode())
        if not is_token_valid or type(rank) is not int or rank not in self._expected:
            raise ValueError("not a rank of this run")
        self._connections[connection] = rank
        connection.line_bytes = MESSAGE_BYTES
        del self._unidentified[connection]

    def _drop_unidentified(self, now: float) -> None:
        """Close unidentified connections that sent no token in time, and the oldest ones if there are too many."""
        max_unidentified = len(self._expected) + MAX_UNIDENTIFIED - self._n_identified
        late = [connection for connection, since in self._unidentified.items() if now - since > TOKEN_SECONDS]
        surplus = list(self._unidentified)[: max(0, len(self._unidentified) - max_unidentified)]
        for connection in {*late, *surplus}:
            self._drop(connection)

    def _drop(self, connection: JsonConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._connections[connection]
        self._unidentified.pop(connection, None)

    def _list_identified(self) -> list[JsonConnection]:
        """Return the identified connections, this process's own last: it may exit as soon as it has the message."""
        pairs = [(rank, connection) for connection, rank in self._connections.items() if rank is not None]
        return [connection for _, connection in sorted(pairs, key=lambda pair: pair[0], reverse=True)]

    def _broadcast(self, message: Message) -> None:
        for connection in self._list_identified():
            connection.send(message)

    def _broadcast_last(self, message: Message) -> None:
        deadline = time.monotonic() + LAST_MESSAGE_SECONDS
        for connection in self._list_identified():
            connection.send_last(message, deadline)

    def _close(self) -> None:
        """Close all connections after the peers have closed theirs.

        If a socket is closed with unread data, TCP discards what it sent last.
        """
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
    """Receives heartbeats until every rank has exited, or a diagnosis is broadcast.

    hosts: host of each rank. hang_timeout: seconds without progress that count as a hang. heartbeat_interval: seconds
    between heartbeats. token: secret that identifies ranks of this run. relays: for each rank, the rank that forwards
    its messages (default: itself).
    """

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
        super().__init__("megatfm-rank-monitor", set(self._relays), heartbeat_interval, token, listener, warn)
        self._ranks_without_message = set(range(len(hosts)))
        now = time.monotonic()
        self._detector = HangDetector(hosts, hang_timeout, max(4 * heartbeat_interval, 1.0), now, self._relays)
        self._next_diagnosis = now
        self._warn_without_message_at: float | None = now + max(FIRST_MESSAGE_SECONDS, 4 * heartbeat_interval)

    def _exclude_pause(self, seconds: float) -> None:
        self._detector.exclude_pause(seconds)

    def _advance(self, now: float) -> Message | None:
        """Return the diagnosis once there is one, or {"bye": True} after all ranks have exited."""
        if self._warn_without_message_at and now > self._warn_without_message_at:
            self._warn_without_message_at = None
            self._warn_of_ranks_without_message()
        if now < self._next_diagnosis and not self._detector.all_gone:  # ranks wait for the farewell
            return None
        self._next_diagnosis = now + DIAGNOSE_INTERVAL_SECONDS
        if diagnosis := self._detector.diagnose(now):
            return {"diagnosis": diagnosis.to_dict()}
        return {"bye": True} if self._detector.all_gone else None

    def _warn_of_ranks_without_message(self) -> None:
        """Warn of ranks that have never sent a message."""
        if ranks := sorted(self._ranks_without_message):
            names = ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")
            self._warn(
                f"the rank monitor has had no message from {len(ranks)} of {len(self._relays)} ranks since the "
                f"start: {names}"
            )

    def _handle(self, rank: int, message: Message, now: float) -> None:
        for sender, inner in message.get("relayed", [(rank, message)]):
            if self._relays[sender] != rank:
                raise ValueError(f"rank {rank} is not the relay of rank {sender}")
            self._ranks_without_message.discard(sender)
            if "heartbeat" in inner:
                self._detector.record_heartbeat(sender, Heartbeat(**inner["heartbeat"]), now)
            elif "failed" in inner:
                refused = inner.get("refused", False)
                self._detector.record_failure(sender, inner["failed"], now, inner["lost_peer"], refused)
            elif "lost" in inner:
                self._detector.record_failure(sender, None, now)
            elif "bye" in inner:
                self._detector.record_exit(sender)


class RankMonitorRelay(_Hub):
    """Forwards messages between the ranks of a node and the server, until the server's last message.

    ranks: ranks of this node. server: connection to the server. hang_timeout: the run's hang timeout; a server that is
    silent for a little longer counts as lost.
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
        super().__init__("megatfm-rank-relay", set(ranks), heartbeat_interval, token, listener, warn)
        self._server, self._hang_timeout = server, hang_timeout
        self._selector.register(server, selectors.EVENT_READ)
        self._last_message: Message | None = None
        self._server_heard_at = self._next_batch = time.monotonic()
        # rank → heartbeat to forward, time of arrival
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        self._phases: dict[int, str] = {}  # rank → last phase that was forwarded
        self._events: list[tuple[int, Message]] = []

    def run(self) -> None:
        """See `_Hub.run`."""
        self._server_heard_at = time.monotonic()
        super().run()

    def _receive(self, connection: JsonConnection, now: float) -> None:
        if connection is not self._server:
            super()._receive(connection, now)
            return
        self._server_heard_at = now
        messages = connection.receive()
        if messages is None:
            messages = [{"server_lost": ENDED_SILENTLY, "hung": False}]
        for message in messages:
            if "heartbeat" not in message:
                self._last_message = self._last_message or message

    def _handle(self, rank: int, message: Message, now: float) -> None:
        if "heartbeat" in message:
            self._heartbeats[rank] = Heartbeat(**message["heartbeat"]), now
        else:
            self._events.append((rank, message))

    def _exclude_pause(self, seconds: float) -> None:
        self._server_heard_at += seconds

    def _advance(self, now: float) -> Message | None:
        """Forward messages to the server. Returns its last one, or one that says that it is lost."""
        silence = now - self._server_heard_at
        if self._last_message is None and silence > self._hang_timeout + 3 * self._heartbeat_interval:
            self._last_message = {"server_lost": f"no sign of life for {silence:.0f} s", "hung": True}
        if self._events or now >= self._next_batch or self._has_new_phase():
            self._next_batch = now + self._heartbeat_interval / 4
            self._forward(now)
        return self._last_message

    def _close(self) -> None:
        self._selector.unregister(self._server)
        self._server.close()
        super()._close()

    def _has_new_phase(self) -> bool:
        """Return whether the server must be told of a rank's new phase, so that a sudden death is reported with it."""
        return any(self._phases.get(rank) != heartbeat.phase for rank, (heartbeat, _) in self._heartbeats.items())

    def _forward(self, now: float) -> None:
        """Send all heartbeats and events as one message; keep them if the server's buffer is full."""
        heartbeats = [
            (rank, {"heartbeat": replace(heartbeat, age=heartbeat.age + now - since).__dict__})
            for rank, (heartbeat, since) in self._heartbeats.items()
        ]
        if (heartbeats or self._events) and self._server.send({"relayed": [*heartbeats, *self._events]}):
            self._phases.update({rank: heartbeat.phase for rank, (heartbeat, _) in self._heartbeats.items()})
            self._heartbeats, self._events = {}, []
