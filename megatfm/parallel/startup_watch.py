"""While ranks meet, nobody watches them yet: a thread sees those of this machine that a signal has stopped.

Meeting waits inside torch's or MPI's own code, where only the end of the process interrupts it.
"""

import contextlib
import os
import signal
import socket
import threading
from collections import Counter
from types import TracebackType
from typing import Self

import psutil

from megatfm.errors import EXIT_FAILED, EXIT_REQUEUE, MegatfmError
from megatfm.parallel import sentinel
from megatfm.parallel.process_environment import ProcessEnvironment, read_process_environment

LOOK_SECONDS = 0.2
STOPPED_POLLS = 100
"""Looks in a row that find a rank stopped until it counts as lost: twenty seconds in which this process ran itself."""
SIGNALLED_POLLS = 50
"""The same for a signal that asks this rank to stop, while the others are still missing: they may be just behind."""
ASKS_TO_STOP = {signal.SIGUSR1, signal.SIGTERM}


class StartupWatch:
    """While entered, ends this process when a rank beside it stays stopped, or when it is asked to stop for long."""

    def __init__(self, env: ProcessEnvironment) -> None:
        self._place = env
        self._over = threading.Event()
        self._ending = threading.Lock()  # they have met, or it ends this process: not both
        self._thread = threading.Thread(target=self._watch, name="megatfm-startup-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._place.world_size > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._ending:
            self._over.set()
        sentinel.end()

    def _watch(self) -> None:
        stopped, asked = Counter[int](), 0
        while not self._over.wait(LOOK_SECONDS):
            stopped = Counter({rank: stopped[rank] + 1 for rank in stopped_here(self._place)})
            if gone := [rank for rank, looks in stopped.items() if looks > STOPPED_POLLS]:
                self._end(
                    EXIT_FAILED,
                    f"error: rank {gone[0]} of {self._place.world_size} on {socket.gethostname()} is stopped "
                    "(SIGSTOP), and was not continued while the others waited to meet it",
                )
            asked += bool(signal.sigpending() & ASKS_TO_STOP)
            if asked > SIGNALLED_POLLS:
                self._end(
                    EXIT_REQUEUE, "stopped by a signal before all ranks had come: there is nothing to save"
                )

    def _end(self, code: int, text: str) -> None:
        with self._ending:
            if not self._over.is_set():
                os.write(2, f"{text}\n".encode())
                os._exit(code)


def stopped_here(env: ProcessEnvironment) -> list[int]:
    """Ranks of the same run that were started by the process that started this one, and are stopped by a signal."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error, MegatfmError):
                if process.status() == psutil.STATUS_STOPPED:
                    other = read_process_environment(process.environ())
                    if (other.launcher, other.world_size) == (env.launcher, env.world_size):
                        found.append(other.rank)
    return found
