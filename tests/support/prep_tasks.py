"""Preparations by several tasks, here threads, and preparations that are stopped or held where a stage is committed."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import AtomicFile
from megatfm.data_prep import pipeline
from megatfm.data_prep.execution.executors import LockExecutor
from megatfm.data_prep.execution.workspace import Workspace
from tests.support.workers import start_fork_server

PATIENCE = 60


class StoppedError(BaseException):
    """An exit that, as a kill, nothing handles."""


def run_task(config: PrepConfig, number: int, count: int = 2) -> None:
    """Do the part of a task of an array."""
    data_prep.run(config, make_executor=lambda folder: LockExecutor(number, count, folder))


def run_tasks(config: PrepConfig, count: int) -> None:
    """Run all tasks of an array at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def task(number: int) -> None:
        try:
            run_task(config, number, count)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=task, args=(n,), name=f"task-{n}") for n in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]


@contextmanager
def stop_before_commit(stage: str) -> Iterator[None]:
    """Context manager whose preparation is stopped when a stage is done, and is about to be committed."""
    commit = Workspace.commit

    def stop(self: Workspace, name: str, *remaining: Any, **options: Any) -> None:
        if name == stage:
            raise StoppedError
        commit(self, name, *remaining, **options)

    def finish(*_: Any, **__: Any) -> None:
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "commit", stop)
        if stage == "finish":
            patch.setattr(Workspace, "finish", finish)
        with pytest.raises(StoppedError):
            yield


@contextmanager
def hold_first_task(config: PrepConfig) -> Iterator[None]:
    """Context manager during which the first of two tasks waits with a stage that is done; then it finishes."""
    is_working, may_finish = threading.Event(), threading.Event()
    commit = Workspace.commit

    def wait(self: Workspace, *stage: Any, **options: Any) -> None:
        is_working.set()
        assert may_finish.wait(PATIENCE)
        commit(self, *stage, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "commit", wait)
        first = threading.Thread(target=run_task, args=(config, 1))
        first.start()
        assert is_working.wait(PATIENCE)
        try:
            yield
        finally:
            may_finish.set()
            first.join(PATIENCE)


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
