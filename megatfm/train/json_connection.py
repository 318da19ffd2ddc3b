"""Connections between threads of ranks that carry JSON objects, one a line, and never wait."""

import contextlib
import json
import socket
import time
from typing import Any

LINE_BYTES = 64 * 1024
"""Longest message of a peer that nobody knows yet, and what is read at once."""
MESSAGE_BYTES = 64 * 2**20
"""Longest message of one that is known."""

Message = dict[str, Any]


class JsonConnection:
    """One end of a connection that carries JSON objects, one a line. Never waits.

    line_bytes: the longest line that is received.
    """

    def __init__(self, connection: socket.socket, line_bytes: int = MESSAGE_BYTES) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.line_bytes = connection, line_bytes
        self._unread = self._unsent = b""

    def fileno(self) -> int:
        """The socket's descriptor, by which a selector waits for the connection."""
        return self.connection.fileno()

    def send(self, message: Message) -> bool:
        """Send a message, or drop it whole, and return whether it was taken: a peer whose buffer is full, or that is
        gone, is found out by silence."""
        if (
            self._unsent and not self._send_on()
        ):  # the end of one, without which the next would be glued to it
            return False
        self._unsent = json.dumps(message).encode() + b"\n"
        length = len(self._unsent)
        self._send_on()
        if len(self._unsent) == length:
            self._unsent = b""
            return False
        return True

    def send_last(self, message: Message, deadline: float) -> None:
        """Send a message to its end, until a time of time.monotonic()."""
        with contextlib.suppress(OSError, ValueError):
            data = self._unsent + json.dumps(message).encode() + b"\n"
            self.connection.settimeout(max(0.1, deadline - time.monotonic()))
            self.connection.sendall(data)

    def _send_on(self) -> bool:
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(self._unsent) :]
        return not self._unsent

    def receive(self) -> list[Message] | None:
        """Return the messages since the last call, or None when the other end is closed (or talks nonsense)."""
        try:
            data = self.connection.recv(LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > self.line_bytes:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Stop sending, and wake the peer that waits for more. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(how)

    def close(self) -> None:
        """Give the descriptor back at once, whatever is still unread."""
        self.connection.close()
