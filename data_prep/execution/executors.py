"""Executors: the processes that prepare one corpus together, and the settings on which they agree.

A process is alone, a task that claims parts by locks, or a rank under MPI. All of them run the same stages.
`run_tasks` divides the parts of a stage among them and returns when all are done; `run_once` lets one of them do what
can't be divided. Neither changes the result: parts depend on the config alone.

Ranks under mpirun claim parts, too: whoever is free takes the next one, and one that dies leaves its part to the
others, if mpirun lets these live. MPI itself is used only where the file system has no locks, or a corpus is to be
replaced.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatfm.corpus.files import write_whole
from megatfm.errors import MegatfmError, UsageError

POLL_SECONDS = 0.2
FINISH = "finish"
"""The last stage, which commits the whole."""

StageResult = dict[str, Any]


class TaskExecutor(Protocol):
    """This process among those that work together; `number` counts from 1."""

    rank: int
    size: int

    def run_tasks(
        self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]
    ) -> None:
        """Do some of the parts 0 … count − 1, each once for all; returns when all are done."""
        ...

    def run_once(
        self, name: str, find: Callable[[], StageResult | None], work: Callable[[], StageResult]
    ) -> StageResult:
        """Return `find()`; if it is None, one process runs `work()` and all return its result."""
        ...

    def broadcast_result(self, read: Callable[[], StageResult | None]) -> StageResult | None:
        """Return `read()` as rank 0 sees it under MPI, whose ranks must act alike; others read for themselves."""
        ...


class LocalExecutor:
    """A single process."""

    rank = size = 1

    def run_tasks(
        self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]
    ) -> None:
        for part in range(count):
            if not is_done(part):
                work(part)

    def run_once(
        self, name: str, find: Callable[[], StageResult | None], work: Callable[[], StageResult]
    ) -> StageResult:
        result = find()
        return work() if result is None else result

    def broadcast_result(self, read: Callable[[], StageResult | None]) -> StageResult | None:
        return read()


class LockExecutor:
    """Tasks that start when they like, and claim parts by locks that die with them: one that is killed leaves its
    part to the others, down to the last."""

    def __init__(self, number: int, size: int, folder: Path) -> None:
        self.rank, self.size = number, size
        self._folder = folder

    def run_tasks(
        self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]
    ) -> None:
        first = (self.rank - 1) * count // self.size  # each begins elsewhere, so that few meet
        left = [(first + part) % count for part in range(count)]
        while left := [part for part in left if not is_done(part)]:
            for part in left:
                with self._claim(f"{name}.{part}") as mine:
                    if mine and not is_done(part):
                        work(part)
            if not all(map(is_done, left)):
                time.sleep(POLL_SECONDS)

    def run_once(
        self, name: str, find: Callable[[], StageResult | None], work: Callable[[], StageResult]
    ) -> StageResult:
        while (result := find()) is None:
            with self._claim(name) as mine:
                if mine and (result := find()) is None:
                    return work()
            if result is None:
                time.sleep(POLL_SECONDS)
        return result

    def broadcast_result(self, read: Callable[[], StageResult | None]) -> StageResult | None:
        return read()

    @contextmanager
    def _claim(self, name: str) -> Iterator[bool]:
        folder = self._folder / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(file)


class MpiExecutor:
    """Ranks under mpirun: parts by turns, the rest by rank 0. A rank that fails ends all, as MPI does."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.rank, self.size = world.rank + 1, world.size

    def run_tasks(
        self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]
    ) -> None:
        for part in range(self.rank - 1, count, self.size):
            if not is_done(part):
                work(part)
        self._wait()

    def run_once(
        self, name: str, find: Callable[[], StageResult | None], work: Callable[[], StageResult]
    ) -> StageResult:
        result = None
        if self.rank == 1:
            result_before = find()
            result = work() if result_before is None else result_before
        self._wait()  # a broadcast alone would keep the others' cores busy until it comes
        shared: StageResult = self._world.bcast(result)
        return shared

    def broadcast_result(self, read: Callable[[], StageResult | None]) -> StageResult | None:
        seen: StageResult | None = self._world.bcast(read() if self.rank == 1 else None)
        return seen

    def _wait(self) -> None:
        """A barrier that leaves the cores to those who still work."""
        barrier = self._world.Ibarrier()
        while not barrier.Test():
            time.sleep(0.01)


def parse_task(text: str) -> tuple[int, int]:
    """`3/8` → (3, 8). Raises UsageError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= size:
        raise UsageError(f"--task {text}: which task of how many, counted from 1, for example 3/8")
    return number, size


# Where mpirun of Open MPI, that of MPICH and `srun --mpi=pmix` say who we are, and how many there are.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)


def mpi_rank_from_environment(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Our number, from 1, and how many mpirun started; None if it started one or none."""
    for rank, size in _RANKS:
        if rank in environment and int(environment.get(size, "1")) > 1:
            return int(environment[rank]) + 1, int(environment[size])
    return None


def supports_flock(folder: Path) -> bool:
    """Whether files there can be locked, as claims need it; the folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # which those who work there are told of
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def mpi_world(wanted: int) -> Any:
    """MPI's world of so many ranks. Raises UsageError without a usable mpi4py."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"started by mpirun, but mpi4py can't be used ({str(error).splitlines()[0]}): pip install 'megatfm[mpi]', "
            "with an MPI library on the system"
        ) from error
    if MPI.COMM_WORLD.size == 1:
        raise MegatfmError(
            f"mpirun started {wanted} processes, but mpi4py sees 1: it loads another MPI library; point MPI4PY_LIBMPI "
            "at the one of this mpirun"
        )
    return MPI.COMM_WORLD


CONFIG = "config.json"
_SECONDS = 10.0
"""How long the first of several may take to write its settings down."""


class Agreement:
    """Holds a lock in the work folder: alone, a process may say what the settings are; others must have the same.

    The lock is on a file, as network file systems keep locks on folders to one machine, and dies with its process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def settle(self, settings: Mapping[str, Any], shared: bool) -> dict[str, Any] | None:
        """Write `settings` if nobody else is at work, else compare: returns those of the others if they differ.

        shared: whether others may be at work. Raises UsageError if they are and mustn't, MegatfmError if the first of
        them doesn't say what its settings are.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "tasks"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        settings = json.loads(json.dumps(settings))
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            if self._lock(fcntl.LOCK_EX):
                write_whole(self._folder / CONFIG, json.dumps(settings, indent=2).encode())
                # Another may slip in between the two locks: then it has written what counts.
                if not shared or self._lock(fcntl.LOCK_SH):
                    return None
            elif not shared:
                raise UsageError(
                    f"{self._folder.parent}: another prep is working here: wait for it, or choose another out"
                )
            elif self._lock(fcntl.LOCK_SH):
                recorded: dict[str, Any] = json.loads((self._folder / CONFIG).read_bytes())
                return None if recorded == settings else recorded
            time.sleep(0.02)
        raise MegatfmError(
            f"{path}: another task holds this lock and doesn't say what it prepares: end it, or start again later"
        )

    def close(self) -> None:
        """Leave the others."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, kind: int) -> bool:
        """Whether the lock is had. Without locks on this file system there is nobody to agree with."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
