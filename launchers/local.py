"""Foreground launchers: start ranks on this machine or under mpirun, and restart them after failures."""

import os
import random
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from megatfm.config import Config
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS, MegatfmError, UsageError
from megatfm.files import NEW_RUN_VARIABLE, NewPaths
from megatfm.launchers.attempts import FINAL_EXIT_REASONS, RESTARTS, UNFINISHED, Attempt, AttemptLog
from megatfm.launchers.job import Job, make_python_path
from megatfm.launchers.record import (
    LAUNCH,
    is_finished,
    lock_launch_record,
    read_last_state_event,
    read_launch_record,
    write_launch_record,
)
from megatfm.launchers.run_jobs import describe_process, refuse_concurrent_launch
from megatfm.launchers.supervisor import Child, supervise
from megatfm.terminal import print_to_stderr

# Below Linux's default range of ephemeral ports, so that no outgoing connection takes the port before rank 0 does.
PORTS = range(12_000, 32_000)


class ForegroundLauncher:
    """Runs a job while this process waits, and restarts it after failures, up to a limit."""

    name: str

    def __init__(self, max_restarts: int = 0) -> None:
        self.max_restarts = max_restarts
        self._is_told_to_stop = False

    def supervise(self, children: Sequence[Child]) -> int:
        """Run all children to their end, and note whether they were told to stop; return their common exit code."""

        def note_signal() -> None:
            self._is_told_to_stop = True

        return supervise(children, note_signal)

    def run(self, job: Job, attempt: Callable[[bool], int], new_paths: NewPaths) -> int:
        """Run the job to its end, with restarts; return the last exit code, or 76 if restarts make no progress.

        attempt: function that starts the ranks once. Its argument says whether the run directory is new; it returns
        the ranks' common exit code.
        """
        run = job.run_dir
        if job.kind == "evaluate":  # its launch record would replace the run's own
            refuse_concurrent_launch(job)
            return attempt(False)
        code = EXIT_USAGE
        try:
            code = self._run_recorded(job, attempt, new_paths)
        except OSError as error:
            place = error.filename or run
            reason = f"{error.strerror}: make room there, or give another name or run_dir"
            raise MegatfmError(f"{place}: can't write the run directory: {reason}") from error
        finally:
            # Ranks that were refused have removed their files. Any other file would belong to a run that began. The
            # state of a run that is there already stays.
            if code == EXIT_USAGE and new_paths.is_new(run) and new_paths.holds_all_of(run):
                new_paths.remove()
            elif code in (EXIT_USAGE, LOCKED):
                new_paths.restore()
        return code

    def _run_recorded(self, job: Job, attempt: Callable[[bool], int], new_paths: NewPaths) -> int:
        """Record this process in the run directory while the job runs, for `megatfm status` and `megatfm cancel`.

        Raises LockedError, UsageError if the run has another launcher or job.
        """
        launch_record: dict[str, Any] = {"launcher": self.name, "kind": job.kind, "host": socket.gethostname()}
        launch_record |= job.corpus_url
        process = describe_process(psutil.Process())
        new_paths.make_folder(job.run_dir)
        with lock_launch_record(job.run_dir):  # of two launchers that begin at once, one is refused
            refuse_concurrent_launch(job)
            _register_files(job, new_paths)
            write_launch_record(job.run_dir, **launch_record, **process)
        try:
            if job.kind == "train":
                return self._run_with_restarts(job, attempt, new_paths)
            launch_record["exit_code"] = code = attempt(new_paths.is_new(job.run_dir))
            return code
        finally:
            with lock_launch_record(job.run_dir):
                if read_launch_record(job.run_dir).items() >= process.items():
                    _record_end(job.run_dir, launch_record)
                else:  # another launcher has begun since
                    new_paths.replaced.clear()

    def _run_with_restarts(self, job: Job, attempt: Callable[[bool], int], new_paths: NewPaths) -> int:
        """Start attempts until one ends for good, or until restarts make no progress."""
        assert isinstance(job.config, Config)
        run, steps, is_new = job.run_dir, job.config.train.steps, new_paths.is_new(job.run_dir)
        last_event = read_last_state_event(run)
        submission, attempt_log = f"{socket.gethostname()}:{os.getpid()}:{time.time()}", AttemptLog(run)
        while True:
            started_attempt = attempt_log.begin(
                Attempt(time.time(), submission=submission, job=submission, nodes=[socket.gethostname()])
            )
            code, is_new = attempt(is_new), False
            if code == LOCKED:  # the records are those of the run that holds the lock
                new_paths.replaced.pop(run / RESTARTS, None)
                attempt_log.discard(started_attempt)
                return code
            if code == EXIT_REQUEUE and is_finished(run, steps):  # it was told to stop after its last step
                code = EXIT_OK
            elif code == EXIT_OK and not is_finished(run, steps):
                code = EXIT_FAILED
                print_to_stderr(f"megatfm: {UNFINISHED}")
            if code != EXIT_USAGE or read_last_state_event(run) != last_event:  # it began, so its records are kept
                new_paths.replaced.clear()
            reason = FINAL_EXIT_REASONS.get(
                code, "stopped by a signal" if code == EXIT_REQUEUE else f"exit code {code}"
            )
            asked = self._is_told_to_stop and code not in FINAL_EXIT_REASONS
            ended_attempt = attempt_log.end(
                replace(started_attempt, ended=time.time(), code=code, reason=reason, asked=asked)
            )
            if code in FINAL_EXIT_REASONS or code == EXIT_REQUEUE or asked or not self.max_restarts:
                return code
            if limit_reason := attempt_log.explain_restart_limit(submission, self.max_restarts):
                print_to_stderr(f"megatfm: no progress: {limit_reason}")
                attempt_log.end(replace(ended_attempt, code=NO_PROGRESS, reason=limit_reason))
                return NO_PROGRESS
            print_to_stderr(f"megatfm: restarting; the newest checkpoint is of step {ended_attempt.step}")


class LocalLauncher(ForegroundLauncher):
    """Starts the ranks as child processes. Rank 0 writes to this terminal, rank K to RUN/logs/rank-K.log."""

    name = "local"

    def render(self, job: Job) -> dict[str, str]:
        """Return a shell script with one line per rank."""
        lines = []
        for child in self._make_children(job, PORTS[0]):
            env = " ".join(f"{key}={shlex.quote(value)}" for key, value in child.environment.items())
            output = f" >>{shlex.quote(str(child.log))} 2>&1" if child.log else ""
            lines.append(f"{env} {shlex.join(child.command)}{output} &")
        return {"launch.sh": "\n".join([*lines, "wait", ""])}

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Run the job to its end; return the ranks' common exit code."""
        return self.run(
            job, lambda is_new: self.supervise(self._make_children(job, find_free_port(), is_new)), new_paths
        )

    def _make_children(self, job: Job, port: int, is_new: bool = False) -> list[Child]:
        ranks = range(job.world_size)
        if job.kind == "prep":  # workers coordinate through files, and need no address
            return [
                Child(
                    f"worker {rank + 1}",
                    [*job.command, "--part", f"{rank + 1}/{job.world_size}"],
                    make_default_env(job.world_size),
                    job.run_dir / "logs" / f"worker-{rank + 1}.log" if rank else None,
                )
                for rank in ranks
            ]
        shared = {
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_WORLD_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # Loopback, so that gloo need not resolve this machine's name.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **make_default_env(job.world_size),
            **make_new_run_env(job, is_new),
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


def _record_end(run: Path, launch_record: Mapping[str, Any]) -> None:
    """Record that a launcher has ended. A full disk must not change its exit code."""
    try:
        write_launch_record(run, **launch_record)
    except OSError as error:
        print_to_stderr(f"megatfm: {run / LAUNCH}: can't be written: {error.strerror}")


def _register_files(job: Job, new_paths: NewPaths) -> None:
    """Register the files that launcher and ranks will write to the run directory, for removal."""
    run = job.run_dir
    new_paths.will_make_folder(run / "logs")
    prefix = "worker" if job.kind == "prep" else "rank"
    logs = [f"logs/{prefix}-{index}.log" for index in range(1, job.world_size + 1)]
    for name in (LAUNCH, RESTARTS):
        new_paths.will_replace(run / name)
    for name in logs:
        new_paths.will_write(run / name)


def make_new_run_env(job: Job, is_new: bool) -> dict[str, str]:
    """Return the environment variable that tells ranks that their run directory is new; empty if it is not."""
    return {NEW_RUN_VARIABLE: str(job.run_dir)} if is_new else {}


def make_default_env(processes: int) -> dict[str, str]:
    """Return a rank's default environment variables on this machine. The user's own values win."""
    # macOS has no CPU affinity.
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {
        "OMP_NUM_THREADS": str(max(1, n_cores // processes)),
        "PYTHONUNBUFFERED": "1",  # so that the log of a killed rank is complete
    }
    return {key: os.environ.get(key, value) for key, value in env.items()} | make_python_path()


def find_free_port() -> int:
    """Return a port on which no process listens. Raises MegatfmError when none is found."""
    for port in random.SystemRandom().sample(PORTS, 100):  # two processes with one seed would choose alike
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise MegatfmError(
        f"no free port found between {PORTS[0]} and {PORTS[-1]} on 127.0.0.1: do other processes use them all?"
    )


class MpiLauncher(ForegroundLauncher):
    """Starts the ranks by mpirun (Open MPI or MPICH). All of them write to this terminal."""

    name = "mpi"

    def render(self, job: Job) -> dict[str, str]:
        """Return a shell script with the mpirun command."""
        child = self._make_child(job)
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in child.environment.items())
        return {"launch.sh": f"{env} {shlex.join(child.command)}\n"}

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Run the job to its end; return the ranks' common exit code."""
        if not shutil.which("mpirun"):
            raise UsageError(
                "mpirun is not on PATH: install openmpi-bin (`make system-deps`), load your site's MPI module, or "
                f"use --nproc {job.world_size}"
            )
        return self.run(job, lambda is_new: self.supervise([self._make_child(job, is_new)]), new_paths)

    def _make_child(self, job: Job, is_new: bool = False) -> Child:
        return Child(
            "mpirun",
            ["mpirun", "-n", str(job.world_size), *job.command],
            {**make_mpi_env(), **make_default_env(job.world_size), **make_new_run_env(job, is_new)},
            # mpirun answers SIGTERM by killing the ranks, but passes SIGUSR1 on, so that they can save.
            stop_signal=signal.SIGUSR1,
            parent_death_signal=signal.SIGTERM,
        )


def make_mpi_env() -> dict[str, str]:
    """Return variables for Open MPI 4 and 5. MPICH ignores them, and behaves this way by default."""
    env = {
        # Allow more ranks than cores, for laptops. Binding would confine all threads of a rank to one core.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {key: os.environ.get(key, value) for key, value in env.items()}
