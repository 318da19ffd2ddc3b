"""A rank's end of its connection to the rank monitor."""

import socket
from typing import Any

from megatfm.train.hang_detector import Heartbeat
from megatfm.train.json_connection import JsonConnection
from tests.support.waiting import wait_until


def connect(listener: socket.socket) -> JsonConnection:
    """Connect to a listener on this machine."""
    return JsonConnection(socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5))


def make_heartbeat(step: int = 3, phase: str = "step", age: float = 0.0) -> dict[str, Any]:
    """The message of a rank that waits in a collective."""
    return {"heartbeat": Heartbeat(step, phase, step, age, True, "").__dict__}


class MonitorClient:
    """A connection that introduces itself as a rank's, if one is given, and keeps all messages."""

    def __init__(self, listener: socket.socket, rank: int | None = None, token: str = "secret") -> None:
        self.line = connect(listener)
        self.heard: list[dict[str, Any]] = []
        if rank is not None:
            self.send(rank=rank, token=token)

    def send(self, **message: Any) -> None:
        """Send a message."""
        self.line.send(message)

    def heartbeat(self, step: int = 3, phase: str = "step", age: float = 0.0) -> None:
        """Send a sign of life."""
        self.line.send(make_heartbeat(step, phase, age))

    def listen(self) -> list[dict[str, Any]]:
        """Take what has arrived; return all messages so far."""
        self.heard += self.line.receive() or []
        return self.heard

    def hears(self, key: str) -> Any:
        """Wait for a message with this key; return its value."""
        wait_until(lambda: any(key in message for message in self.listen()))
        return next(message[key] for message in self.heard if key in message)

    def wait_until_closed(self) -> None:
        """Wait until the other side closes the connection."""
        wait_until(lambda: self.line.receive() is None)
