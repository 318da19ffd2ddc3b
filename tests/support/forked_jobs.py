"""A Python for jobs of the test cluster whose processes are forked from one that has imported torch.

`PythonServer.program` stands for Python in a batch script (see `python_client.py`). The server forks a process into the
namespaces of the node on which the client runs, with the client's outputs, variables and folder: so it dies with its
node, and it is signalled and ends with its client. A fork can't show that the job's copy of the code is imported: a
job of `tests/e2e/slurm/test_failures.py` starts a real Python.
"""

import ctypes
import json
import os
import select
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked_commands import PR_SET_PDEATHSIG, parse_command, run_program, set_up_child
from tests.support.workers import start_fork_server

CLIENT = Path(__file__).with_name("python_client.py")
NAMESPACES = ("uts", "net", "pid", "mnt")
PEER_CREDENTIALS = 12
"""Bytes of a `struct ucred`: pid, uid, gid."""


class PythonServer:
    """The process from which jobs are forked, and the program that asks it."""

    def __init__(self, folder: Path) -> None:
        path, self.program = folder / "socket", folder / "python"
        words = [sys.executable, "-IS", str(CLIENT), str(path), sys.executable]
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.program.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        context = start_fork_server()
        self._process = context.Process(target=serve_clients, args=(listener,), daemon=True)
        self._process.start()
        listener.close()

    def end(self) -> None:
        """End the server, and all that it has forked."""
        self._process.kill()
        self._process.join()


# ------------------------------------------------------------------------------------------------ in the process


def serve_clients(listener: socket.socket) -> NoReturn:
    """Fork a keeper for each client."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that keepers are no zombies
    while True:
        client, _ = listener.accept()
        if not os.fork():
            try:
                listener.close()
                _die_with_parent()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep_process(client)
            finally:
                os._exit(70)
        client.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_process(client: socket.socket) -> None:
    """Fork the client's process; forward its signals, tell it the end, and kill the process if the client is killed."""
    message, outputs, _, _ = socket.recv_fds(client, 8, 3)
    command = json.loads(client.recv(int.from_bytes(message, "big"), socket.MSG_WAITALL))
    pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS)[:4], sys.byteorder)
    _enter_namespaces(pid)
    process = os.fork()
    if not process:
        _run_command(command, outputs)
    for output in outputs:
        os.close(output)
    ended = os.pidfd_open(process)
    while ended not in select.select([ended, client.fileno()], [], [])[0]:
        number = client.recv(1)
        if not number:
            os.kill(process, signal.SIGKILL)
            return
        os.kill(process, number[0])
    _, status = os.waitpid(process, 0)
    client.send(str(os.waitstatus_to_exitcode(status)).encode())


def _enter_namespaces(pid: int) -> None:
    """Enter those namespaces of a process that are not ours; for pids, only what is forked later does."""
    libc = ctypes.CDLL(None, use_errno=True)
    entered = [Path(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES]
    files = [os.open(path, os.O_RDONLY) for path in entered if not path.samefile(f"/proc/self/ns/{path.name}")]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def _run_command(command: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Be the process of the command."""
    try:
        set_up_child((outputs[0], outputs[1], outputs[2]), new_session=False, group=0)
        _die_with_parent()
        words, folder, environment = command["words"], command["folder"], command["environment"]
        for number in command["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        parsed = parse_command(words)
        if parsed is None:
            os.chdir(folder)
            os.execve(sys.executable, [sys.executable, *words], environment)
        module, arguments, safe = parsed
        run_program(module, arguments, folder, environment, safe)
    finally:
        os._exit(71)
