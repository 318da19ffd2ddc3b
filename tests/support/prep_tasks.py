"""Preparations by several tasks, here threads, and preparations that are stopped or held where a stage is committed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.executors import LockExecutor
from megatfm.data_prep.execution.workspace import Workspace

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
