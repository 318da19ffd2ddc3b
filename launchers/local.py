"""Launchers in the foreground: processes on this machine or under mpirun, with restarts after failures."""

import os
import random
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from megatfm.config import Config
from megatfm.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USAGE,
    NO_PROGRESS,
    MegatfmError,
    UsageError,
)
from megatfm.files import NEW_RUN_VARIABLE, NewPaths
from megatfm.launchers.job import Job, python_path
from megatfm.launchers.record import (
    FINAL_EXIT_REASONS,
    LAUNCH,
    RESTARTS,
    UNFINISHED,
    Attempt,
    AttemptLog,
    finished,
    write_launch_record,
)
from megatfm.launchers.run_jobs import refuse_concurrent_launch
from megatfm.launchers.supervisor import Child, supervise

# Below the kernel's range for outgoing connections, so that no connection takes the port before rank 0 does.
PORTS = range(12_000, 32_000)


class ForegroundLauncher:
    """Runs a job under the eyes of this process, and starts it again after a failure if it may."""

    name: str

    def __init__(self, max_restarts: int = 0) -> None:
        self.max_restarts = max_restarts

    def run(self, job: Job, attempt: Callable[[bool], int], new_paths: NewPaths) -> int:
        """Run to the end, and again after failures; returns the last exit code, 76 when restarts gain nothing.

        attempt: takes whether the run directory is new, and returns the ranks' common exit code.
        """
        run = job.run_dir
        refuse_concurrent_launch(job)
        if job.kind == "evaluate":  # a note of it would take the place of the run's own
            return attempt(False)
        code = EXIT_USAGE
        try:
            _note_files(job, new_paths)
            code = self._run_recorded(job, attempt, new_paths.is_new(run))
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or run}: can't write the run directory: {error.strerror}"
            ) from error
        finally:
            # Ranks that were refused have removed their own files: what else is there would be of a run that began.
            if code == EXIT_USAGE and new_paths.is_new(run) and new_paths.holds_all_of(run):
                new_paths.remove()
        return code

    def _run_recorded(self, job: Job, attempt: Callable[[bool], int], is_new: bool) -> int:
        """Run with a record of this process in the run directory, for `megatfm status` and `megatfm cancel`."""
        launch_record = {"launcher": self.name, "kind": job.kind, "host": socket.gethostname()}
        started = psutil.Process().create_time()
        write_launch_record(job.run_dir, **launch_record, pid=os.getpid(), started=started)
        try:
            return self._run_with_restarts(job, attempt, is_new) if job.kind == "train" else attempt(is_new)
        finally:
            write_launch_record(job.run_dir, **launch_record)

    def _run_with_restarts(self, job: Job, attempt: Callable[[bool], int], is_new: bool) -> int:
        """Attempts until one ends for good, or they gain nothing."""
        assert isinstance(job.config, Config)
        run, steps = job.run_dir, job.config.train.steps
        submission, restarts = f"{socket.gethostname()}:{os.getpid()}:{time.time()}", AttemptLog(run)
        while True:
            started_attempt = restarts.begin(
                Attempt(time.time(), submission=submission, job=submission, nodes=[socket.gethostname()])
            )
            code, is_new = attempt(is_new), False
            if code == EXIT_REQUEUE and finished(run, steps):  # asked to stop after its last step
                code = EXIT_OK
            elif code == EXIT_OK and not finished(run, steps):
                code = EXIT_FAILED
                print(f"megatfm: {UNFINISHED}", file=sys.stderr)
            reason = FINAL_EXIT_REASONS.get(
                code, "stopped by a signal" if code == EXIT_REQUEUE else f"exit code {code}"
            )
            ended = restarts.end(replace(started_attempt, ended=time.time(), code=code, reason=reason))
            if code in FINAL_EXIT_REASONS or code == EXIT_REQUEUE or not self.max_restarts:
                return code
            if spent := restarts.restart_limit_reason(submission, self.max_restarts):
                print(f"megatfm: no progress: {spent}", file=sys.stderr)
                restarts.end(replace(ended, code=NO_PROGRESS, reason=spent))
                return NO_PROGRESS
            print("megatfm: starting again from the newest checkpoint", file=sys.stderr)


class LocalLauncher(ForegroundLauncher):
    """Starts the ranks as children. Rank 0 has this terminal, the others write to RUN/logs/rank-K.log."""

    name = "local"

    def render(self, job: Job) -> dict[str, str]:
        """One line of shell a rank."""
        lines = []
        for child in self._children(job, PORTS[0]):
            env = " ".join(f"{key}={shlex.quote(value)}" for key, value in child.environment.items())
            output = f" >>{shlex.quote(str(child.log))} 2>&1" if child.log else ""
            lines.append(f"{env} {shlex.join(child.command)}{output} &")
        return {"launch.sh": "\n".join([*lines, "wait", ""])}

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Run to the end; returns the ranks' common exit code."""
        return self.run(job, lambda is_new: supervise(self._children(job, free_port(), is_new)), new_paths)

    def _children(self, job: Job, port: int, is_new: bool = False) -> list[Child]:
        ranks = range(job.world_size)
        if job.kind == "prep":  # they take parts of the work from one another, and need no address
            return [
                Child(
                    f"worker {rank + 1}",
                    [*job.command, "--part", f"{rank + 1}/{job.world_size}"],
                    default_env(job.world_size),
                    job.run_dir / "logs" / f"worker-{rank + 1}.log" if rank else None,
                )
                for rank in ranks
            ]
        shared = {
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_WORLD_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # needs no name service
            **default_env(job.world_size),
            **new_run_env(job, is_new),
        }
        return [
            Child(
                f"rank {rank}",
                job.command,
                {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared},
                job.run_dir / "logs" / f"rank-{rank}.log" if rank else None,
                blocks_stop_signals=job.kind == "train",
            )
            for rank in ranks
        ]


def _note_files(job: Job, new_paths: NewPaths) -> None:
    """Make the run directory, and note what is about to be written there, by children into their logs too."""
    run = job.run_dir
    new_paths.make_folder(run)
    new_paths.will_make_folder(run / "logs")
    process = "worker" if job.kind == "prep" else "rank"
    logs = [f"logs/{process}-{number}.log" for number in range(1, job.world_size + 1)]
    for name in (LAUNCH, RESTARTS, *logs):
        new_paths.will_write(run / name)


def new_run_env(job: Job, is_new: bool) -> dict[str, str]:
    """Environment variable that marks the run directory as created for these ranks; nothing if it was not."""
    return {NEW_RUN_VARIABLE: str(job.run_dir)} if is_new else {}


def default_env(processes: int) -> dict[str, str]:
    """Settings of a rank on this machine that the user's own environment overrules."""
    # macOS has no affinity.
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {
        "OMP_NUM_THREADS": str(max(1, n_cores // processes)),
        "PYTHONUNBUFFERED": "1",  # the log of a rank that is killed holds its last words
    }
    return {key: os.environ.get(key, value) for key, value in env.items()} | python_path()


def free_port() -> int:
    """Return a port on which no process listens. Raises MegatfmError when none is found."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise MegatfmError(
        f"no free port between {PORTS[0]} and {PORTS[-1]} on 127.0.0.1: is something using them all?"
    )


class MpiLauncher(ForegroundLauncher):
    """Hands the ranks to mpirun, Open MPI's or MPICH's; all of them write to this terminal."""

    name = "mpi"

    def render(self, job: Job) -> dict[str, str]:
        """The mpirun command."""
        child = self._child(job)
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in child.environment.items())
        return {"launch.sh": f"{env} {shlex.join(child.command)}\n"}

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Run to the end; returns mpirun's exit code where it means something (0, 2, 75), else 1."""
        if not shutil.which("mpirun"):
            raise UsageError(
                "mpirun is not on PATH: install openmpi-bin (`make system-deps`), load your site's MPI module, or "
                f"use --nproc {job.world_size}"
            )
        return self.run(job, lambda is_new: supervise([self._child(job, is_new)]), new_paths)

    def _child(self, job: Job, is_new: bool = False) -> Child:
        return Child(
            "mpirun",
            ["mpirun", "-n", str(job.world_size), *job.command],
            {**mpi_env(), **default_env(job.world_size), **new_run_env(job, is_new)},
            # mpirun answers SIGTERM by killing the ranks, but passes SIGUSR1 on, so that they can save.
            stop_signal=signal.SIGUSR1,
            parent_death_signal=signal.SIGTERM,
        )


def mpi_env() -> dict[str, str]:
    """Variables that Open MPI 4 and 5 read; MPICH ignores them and behaves so by itself."""
    env = {
        # More ranks than cores is what a laptop needs; binding would press all threads of a rank onto one core.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {key: os.environ.get(key, value) for key, value in env.items()}
