"""Executors: the processes that prepare one corpus together.

A process is alone, a task that claims parts by locks, or a rank under MPI. All of them run the same stages.
`run_parts` divides the parts of a stage among the processes and returns when all are done; `run_once` runs indivisible
work in one of them. Neither changes the result: parts depend on the config alone.

Ranks under mpirun claim parts by locks as well, so that a rank that dies leaves its part to the others. MPI itself is
used only if the file system has no locks, or if a corpus is to be replaced.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatfm.errors import MegatfmError, UsageError

POLL_SECONDS = 0.2
FINISH = "finish"
"""The last stage, which commits the corpus."""

StageResult = dict[str, Any]
"""Result of a stage, or of a part of it, as JSON."""
FindResult = Callable[[], StageResult | None]
"""Finds the committed result of a stage; None before."""
Work = Callable[[], StageResult]


class Executor(Protocol):
    """Shares the work of a preparation with other processes. `rank` counts from 1."""

    rank: int
    size: int

    def run_parts(self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]) -> None:
        """Do some of the parts 0 … count − 1, each once over all processes; return when all are done."""
        ...

    def run_once(self, name: str, find: FindResult, work: Work) -> StageResult:
        """Return `find()`; if it is None, one process runs `work()` and all return its result."""
        ...

    def broadcast_result(self, read: FindResult) -> StageResult | None:
        """Return rank 0's `read()` under MPI, whose ranks must act alike; other executors call `read()` themselves."""
        return read()


class LocalExecutor(Executor):
    """A single process."""

    rank = size = 1

    def run_parts(self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]) -> None:
        for part in range(count):
            if not is_done(part):
                work(part)

    def run_once(self, name: str, find: FindResult, work: Work) -> StageResult:
        result = find()
        return work() if result is None else result


class LockExecutor(Executor):
    """Tasks that start at any time and claim parts by locks. A lock ends with its process, so a killed task leaves its
    part to the others."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size = rank, size
        self._folder = folder

    def run_parts(self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]) -> None:
        first = (self.rank - 1) * count // self.size  # tasks begin at different parts, so that few meet
        pending_parts = [(first + part) % count for part in range(count)]
        while pending_parts := [part for part in pending_parts if not is_done(part)]:
            for part in pending_parts:
                with self._try_claim(f"{name}.{part}") as is_claimed:
                    if is_claimed and not is_done(part):
                        work(part)
            if not all(map(is_done, pending_parts)):
                time.sleep(POLL_SECONDS)

    def run_once(self, name: str, find: FindResult, work: Work) -> StageResult:
        while (result := find()) is None:
            with self._try_claim(name) as is_claimed:
                if is_claimed and (result := find()) is None:
                    return work()
            if result is None:
                time.sleep(POLL_SECONDS)
        return result

    @contextmanager
    def _try_claim(self, name: str) -> Iterator[bool]:
        folder = self._folder / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)


class MpiExecutor(Executor):
    """Ranks under mpirun take parts in turn; rank 0 does the indivisible work. A rank that fails ends all, as in
    MPI."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.rank, self.size = world.rank + 1, world.size

    def run_parts(self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]) -> None:
        for part in range(self.rank - 1, count, self.size):
            if not is_done(part):
                work(part)
        self._wait()

    def run_once(self, name: str, find: FindResult, work: Work) -> StageResult:
        result = None
        if self.rank == 1:
            committed = find()
            result = work() if committed is None else committed
        self._wait()  # a broadcast alone would keep the others' cores busy until it comes
        shared: StageResult = self._world.bcast(result)
        return shared

    def broadcast_result(self, read: FindResult) -> StageResult | None:
        result: StageResult | None = self._world.bcast(read() if self.rank == 1 else None)
        return result

    def _wait(self) -> None:
        """Wait at a barrier without using the cores that other ranks compute on."""
        barrier = self._world.Ibarrier()
        while not barrier.Test():
            time.sleep(0.01)


def parse_task(text: str) -> tuple[int, int]:
    """Parse `3/8` as (3, 8). Raises UsageError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    task, size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= task <= size:
        raise UsageError(f"--task {text}: which task of how many, counted from 1, for example 3/8")
    return task, size


# Names of rank and world size under mpirun of Open MPI, that of MPICH, and `srun --mpi=pmix`.
_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)


def get_mpi_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank, counted from 1, and the world size; None if mpirun started one process or none."""
    for rank, size in _RANK_VARIABLES:
        if rank in environment and int(environment.get(size, "1")) > 1:
            return int(environment[rank]) + 1, int(environment[size])
    return None


def supports_flock(folder: Path) -> bool:
    """Return whether files in a folder can be locked, which claims need; the folder is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # reported when a file is written there
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


def get_mpi_world(size: int) -> Any:
    """Return MPI's world communicator of `size` ranks. Raises UsageError without a usable mpi4py."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"started by mpirun, but mpi4py can't be used ({str(error).splitlines()[0]}): pip install 'megatfm[mpi]', "
            "with an MPI library on the system"
        ) from error
    if MPI.COMM_WORLD.size == 1:
        raise MegatfmError(
            f"mpirun started {size} processes, but mpi4py sees 1: it loads another MPI library; point MPI4PY_LIBMPI "
            "at the one of this mpirun"
        )
    return MPI.COMM_WORLD
