"""Who else is at work on a run: nobody may start beside it unseen, and all of them can be ended."""

import re
import shlex
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatfm.errors import LockedError, UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.files import LAUNCH, number_of, read_launch_record
from megatfm.launchers.job import Job
from megatfm.launchers.queue import active_jobs, evaluation_job_ids, job_ids


def refuse_concurrent_launch(job: Job) -> list[str]:
    """Refuse a job beside another one that does the same; returns the evaluations that still live.

    Raises LockedError for a process, UsageError for a SLURM job. A queued job reads its config when it starts, and the
    note of a run knows one submission: a second one would change what the first does, and hide it.
    """
    run = job.run_dir
    if job.kind != "evaluate":
        check_no_process(run)
    evaluations = active_jobs(evaluation_job_ids(run))
    living = evaluations if job.kind == "evaluate" else active_jobs(job_ids(run))
    for number, state in living.items():
        if state.is_unknown:
            raise UsageError(
                f"{run}: can't tell whether job {number} still waits or runs ({state.reason}): try again, or where "
                f"SLURM answers; give this one another name; or, if that job is surely gone, delete {run / LAUNCH}"
            )
        what = "evaluates this run" if job.kind == "evaluate" else "is of this run"
        doing = "runs" if state.name == "RUNNING" else f"is in the queue ({state.name})"
        end = number if job.kind == "evaluate" else shlex.quote(str(run))
        other_name = "" if job.kind == "evaluate" else ", or give this one another name"
        raise UsageError(
            f"{run}: job {number} {what}, and {doing}: wait for it, or end it with `megatfm cancel {end}`{other_name}"
        )
    return list(evaluations)


def check_no_process(run: Path) -> None:
    """Refuse a run that a process of this machine has launched. Raises LockedError."""
    if other := launcher_process(run):
        raise LockedError(f"{run}: process {other.pid} runs this already: wait for it or give another name")


def launcher_process(run: Path) -> psutil.Process | None:
    """The process that launched a run, if it lives on this machine."""
    launch_record = read_launch_record(run)
    if launch_record.get("host") != socket.gethostname() or "pid" not in launch_record:
        return None
    try:
        found = psutil.Process(int(number_of(launch_record, "pid") or 0))
        same = (
            abs(found.create_time() - (number_of(launch_record, "started") or 0)) < 1
        )  # else the number was used again
        return found if same and found.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError, OverflowError):
        return None


def cancel(run: Path) -> str:
    """End all that was launched for a run: every job, and the process here, which saves first. Says what was done.

    Raises UsageError if there is nothing to end.
    """
    said, jobs = [], list(active_jobs([*job_ids(run), *evaluation_job_ids(run)]))
    if jobs:
        said.append(_scancel(jobs))
    if found := launcher_process(run):
        try:
            found.send_signal(signal.SIGTERM)
        except psutil.AccessDenied:
            raise UsageError(
                f"{run}: process {found.pid} is of {found.username()}, who alone can end it (or root)"
            ) from None
        except psutil.NoSuchProcess:
            pass  # ended at this moment
        said.append(f"told process {found.pid} to save and stop")
    if not said:
        raise UsageError(f"{run}: {_why_nothing_runs(run)}")
    return ", ".join(said)


def cancel_job_id(number: str) -> str:
    """The same for the run that a SLURM job belongs to; of a job that evaluates, or that no run knows, itself alone.

    Raises UsageError for a job that is none of ours.
    """
    record = scheduler.show_job(number)
    script, log = Path(record.get("Command", "")), Path(record.get("StdOut", ""))
    run = log.parent.parent
    ours = script.parent == run / "slurm" and re.fullmatch(r"slurm-.*\.log", log.name)
    if not record or not ours:
        raise UsageError(
            f"{number}: {'no job of `megatfm launch`' if record else 'SLURM knows no such job'}: give a run directory "
            f"or a job's number{f', or end it with `scancel {number}`' if record else ''}"
        )
    if number in job_ids(run):
        return cancel(run)
    if not (jobs := list(active_jobs([number]))):
        raise UsageError(f"job {number} of {run} is over")
    return _scancel(jobs)


def _scancel(jobs: Sequence[str]) -> str:
    scheduler.cancel(jobs)
    return f"cancelled job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"


def _why_nothing_runs(run: Path) -> str:
    launch_record = read_launch_record(run)
    if launch_record.get("launcher") == "slurm" or launch_record.get("evaluations"):
        return "none of its jobs is in the queue"
    if not (run / LAUNCH).exists():
        return "was not started by `megatfm launch`: stop its process by SIGTERM, and it saves"
    if launch_record.get("host") not in (None, socket.gethostname()):
        return f"was started on {launch_record['host']}: cancel it there"
    return "nothing runs"
