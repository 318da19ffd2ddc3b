"""Starts the processes of a layout on this machine and collects their answers; a failure ends them all at once."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from megatfm.config import Config
from megatfm.errors import MegatfmError, UsageError
from megatfm.verify.batch import Arrays
from megatfm.verify.forkserver import context
from megatfm.verify.rank import Failure, Job, RankInit, RankResult, run_rank

START_SECONDS = 300.0  # to import torch, while all the others do
COLLECTIVE_SECONDS = 20.0  # to wait for another rank, in a step that takes a fraction of a second
STEP_SECONDS = 120.0
GRACE_SECONDS = 1.0  # after the first failure: how long other ranks may still say what they saw
EXIT_SECONDS = 10.0
SECONDARY_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "imed out")
"""Signs of a rank that failed only because another one was gone or late."""


@dataclass(frozen=True)
class RankProcess:
    """One process of the layout, and the line to it."""

    process: ForkServerProcess
    connection: Connection


class RankTeam:
    """Rank processes that stay for the next layout. A failure ends them all; the next step starts new ones."""

    def __init__(self) -> None:
        self._members: list[RankProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, of the processes that are there."""
        return [member.process.pid or 0 for member in self._members]

    def step(self, config: Config, batch: Arrays) -> list[RankResult]:
        """One step of `config` under its layout, a process a rank; the answers by rank.

        Raises MegatfmError that names the rank which failed, died or hangs (UsageError if it is the layout that can't
        be); all processes have ended by then.
        """
        parallel = config.parallel
        world_size = parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp
        try:
            with tempfile.TemporaryDirectory(prefix="megatfm-verify-") as folder:
                present = len(self._members)
                for _ in range(present, world_size):
                    self._members.append(_start())
                _collect(self._members[present:], START_SECONDS)
                processes, store = self._members[:world_size], str(Path(folder) / "store")
                for rank, member in enumerate(
                    processes
                ):  # all are there: from here on, a silent rank is a hanging one
                    place = RankInit(rank, world_size, store, COLLECTIVE_SECONDS)
                    member.connection.send(Job(place, config, batch))
                answers: list[RankResult] = _collect(processes, STEP_SECONDS)
                for member in processes:
                    member.connection.send("leave")
                return answers
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Let the processes end."""
        for member in self._members:
            with suppress(OSError):
                member.connection.send(None)
        for member in self._members:
            member.process.join(EXIT_SECONDS)
        self._kill()

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()
            member.process.join()
            member.connection.close()
        self._members = []


def _start() -> RankProcess:
    ours, theirs = context().Pipe()
    process = context().Process(target=run_rank, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the process's end is seen as the end of the line
    return RankProcess(process, ours)


def _collect(processes: Sequence[RankProcess], seconds: float) -> list[Any]:
    """One message from each rank."""
    pending = {member.connection: rank for rank, member in enumerate(processes)}
    messages: list[Any] = [None] * len(processes)
    failures: dict[int, Failure] = {}
    deadline = time.monotonic() + seconds
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                message = Failure(_exit_reason(processes[rank].process))
            if isinstance(message, Failure):
                failures[rank] = message
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            messages[rank] = message
    if failures or pending:
        raise _error(failures, sorted(pending.values()), seconds)
    return messages


def _error(failures: Mapping[int, Failure], silent: Sequence[int], seconds: float) -> MegatfmError:
    """Blame the cause rather than the ranks that only noticed it."""
    causes = [
        rank
        for rank, failure in failures.items()
        if not any(sign in failure.text for sign in SECONDARY_ERRORS)
    ]
    if not causes and silent:
        waited = COLLECTIVE_SECONDS if failures else seconds
        names = ", ".join(map(str, silent))
        return MegatfmError(
            f"rank {names} hangs: no answer within {waited:g} s; look for a collective that not all ranks reach"
        )
    rank = causes[0] if causes else next(iter(failures))
    failure = failures[rank]
    if failure.is_usage:
        return UsageError(failure.text)
    error = MegatfmError(f"rank {rank} failed: {failure.text}; run with --debug to see where")
    error.add_note(failure.traceback)
    return error


def _exit_reason(process: ForkServerProcess) -> str:
    process.join(EXIT_SECONDS)
    code = process.exitcode
    return (
        f"the process was killed by signal {-code}"
        if code and code < 0
        else f"the process exited with {code}"
    )
