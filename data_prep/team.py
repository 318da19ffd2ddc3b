"""The processes that prepare one corpus together: alone, as tasks that claim parts, or as ranks under MPI.

All of them run the same story. `share` divides the parts of a stage among them, and returns when all parts are
done; `once` lets one of them do what can't be divided. Neither changes the result: parts depend on the config alone.

Ranks under mpirun claim parts, too: whoever is free takes the next one, and one that dies leaves its part to the
others, if mpirun lets these live. MPI itself is used only where the file system has no locks, or a corpus is to be
replaced.
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
        """What `find` gives, or `work` by one of the team; the same for all."""
        ...

    def broadcast_result(self, read: Callable[[], StageResult | None]) -> StageResult | None:
        """What all see: the same for those who must then do the same, that is, under MPI."""
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
        found = find()
        return work() if found is None else found

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
        while (found := find()) is None:
            with self._claim(name) as mine:
                if mine and (found := find()) is None:
                    return work()
            if found is None:
                time.sleep(POLL_SECONDS)
        return found

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
            found = find()
            result = work() if found is None else found
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
        raise UsageError(f"--part {text}: which task of how many, counted from 1, for example 3/8")
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
