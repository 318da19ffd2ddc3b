"""The program in the place of Python in jobs of the test cluster: `SOCKET PYTHON words…`, see `slurm_cluster.py`.

It hands its command to the server at SOCKET, forwards signals to the process that the server forks, and ends as that
does; what the server doesn't fork, it executes. It runs without site-packages, and imports little.
"""

import json
import os
import signal
import socket
import sys

STANDARD = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that any Python ignores."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main() -> None:
    path, python, *words = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:  # the tests have ended
        os.execv(python, [python, *words])
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, _: server.send(bytes([received])))
    numbers = signal.valid_signals() - STANDARD
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    command = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "ignored": ignored}  # noqa: PTH109
    text = json.dumps(command).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(text)
    status = server.recv(8)
    if not status:  # the server is gone, and with it the process
        sys.exit(1)
    code = int(status)
    if code >= 0:
        os._exit(code)
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


main()
