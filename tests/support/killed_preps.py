"""Preparations in processes of their own, which are killed at a chosen moment.

A moment is the number of times that something was written, synced or renamed before.
"""

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import AtomicFile
from megatfm.data_prep import pipeline
from tests.support.workers import start_fork_server

KILLED = -signal.SIGKILL
NEVER = 10**9


class MomentCounter:
    """Counts the moments, and kills this process without warning when the time has come."""

    def __init__(self, last: int) -> None:
        self.now = 0
        self.last = last

    def count_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def tick(*arguments: Any, **named: Any) -> Any:
            if self.now == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.now += 1
            return call(*arguments, **named)

        return tick


def run_until_moment(config: PrepConfig, last: int, moments: Connection) -> None:
    """Prepare, and be killed at a moment; else send the number of moments."""
    clock = MomentCounter(last)
    os.fsync, os.replace = clock.count_calls(os.fsync), clock.count_calls(os.replace)
    AtomicFile.write = clock.count_calls(AtomicFile.write)  # type: ignore[method-assign]
    pipeline.run(config)
    moments.send(clock.now)


def run_killed_at(config: PrepConfig, last: int) -> int | None:
    """The exit code of a preparation that is killed at a moment, which is KILLED if it lasted so long."""
    return _start(config, last)[0]


def count_moments(config: PrepConfig) -> int:
    """Number of moments of a preparation that nobody kills, in a folder beside `config.out`."""
    _, moments = _start(config.model_copy(update={"out": f"{config.out}-counted"}), NEVER)
    count: int = moments.recv()
    return count


def _start(config: PrepConfig, last: int) -> tuple[int | None, Connection]:
    context = start_fork_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_until_moment, args=(config, last, sender))
    process.start()
    sender.close()
    process.join()
    return process.exitcode, receiver
