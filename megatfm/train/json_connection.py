"""Non-blocking socket connections that carry JSON objects, one per line, between the rank monitor's threads."""

import contextlib
import json
import socket
import time
from typing import Any

LINE_BYTES = 64 * 1024
"""Longest message that is accepted from an unidentified peer, and size of one read."""
MESSAGE_BYTES = 64 * 2**20
"""Longest message that is accepted from an identified peer."""

Message = dict[str, Any]


class JsonConnection:
    """One end of a non-blocking connection that carries JSON objects, one per line.

    line_bytes: longest line that is accepted.
    """

    def __init__(self, connection: socket.socket, line_bytes: int = MESSAGE_BYTES) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.line_bytes = connection, line_bytes
        self._unread = self._unsent = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.connection.fileno()

    def send(self, message: Message) -> bool:
        """Send a message, or drop it if the peer's buffer is full or the peer is gone; return whether it was sent.

        A message of which only a part could be sent counts as sent; the next call sends the remainder first.
        """
        if self._unsent and not self._send_unsent():
            return False
        self._unsent = json.dumps(message).encode() + b"\n"
        length = len(self._unsent)
        self._send_unsent()
        if len(self._unsent) == length:
            self._unsent = b""
            return False
        return True

    def send_last(self, message: Message, deadline: float) -> None:
        """Send a message completely, waiting until `deadline` (time.monotonic()) at most."""
        with contextlib.suppress(OSError, ValueError):
            data = self._unsent + json.dumps(message).encode() + b"\n"
            self.connection.settimeout(max(0.1, deadline - time.monotonic()))
            self.connection.sendall(data)

    def _send_unsent(self) -> bool:
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.connection.send(self._unsent) :]
        return not self._unsent

    def receive(self) -> list[Message] | None:
        """Return the messages since the last call; None if the peer has closed, or sent something invalid."""
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
        """Shut the connection down, which wakes the peer. Data that was sent still arrives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(how)

    def close(self) -> None:
        """Close the descriptor at once, even if data is still unread."""
        self.connection.close()
