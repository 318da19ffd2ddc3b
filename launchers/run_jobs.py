"""Jobs and processes of a run directory: their states, the refusal of a second one beside them, and their end.

A job's state comes from the queue, or from the run's own record once SLURM has forgotten the job.
"""

import re
import shlex
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatfm.errors import LockedError, MegatfmError, UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.job import UNKNOWN, Job, JobState
from megatfm.launchers.record import (
    EVENTS,
    FINAL_EXIT_REASONS,
    LAST_EVENT_STATES,
    LAUNCH,
    AttemptLog,
    number_of,
    read_launch_record,
    tail_jsonl,
    texts_of,
)

HELD_ADVICE = "it is held: `scontrol release {job}` lets it go on"
HINTS = "cancel it, and launch with"
PENDING_ADVICE = {
    "JobHeldUser": HELD_ADVICE,
    "JobHeldAdmin": "it is held by the site, or was requeued too often: ask, or `scontrol release {job}`",
    "launch failed requeued held": "a node could not start it, so SLURM holds it: `scontrol release {job}`",
    "job requeued in held state": HELD_ADVICE,
    "PartitionTimeLimit": f"its time limit is above the partition's: {HINTS} less --time",
    "PartitionNodeLimit": f"more nodes than the partition gives: {HINTS} fewer --nodes or another --partition",
    "PartitionDown": f"the partition is closed: wait until it opens, or {HINTS} another --partition",
    "PartitionInactive": f"the partition is closed: {HINTS} another --partition",
    "BadConstraints": f"no node has what it asks for: {HINTS} less",
    "DependencyNeverSatisfied": "the job that it waits for failed: cancel it",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved: `sinfo -R` says why",
    "Nodes required for job are DOWN, DRAINED or reserved": "`sinfo -R` says why",
}
"""squeue's reasons that no waiting mends by itself, by how they begin → what that means, and the way out."""


def job_ids(run: Path) -> list[str]:
    """Numbers of the jobs that were submitted last for a run, in the order of their chain."""
    return texts_of(read_launch_record(run), "jobs")


def evaluation_job_ids(run: Path) -> list[str]:
    """Numbers of the jobs that evaluate a run, or did."""
    return texts_of(read_launch_record(run), "evaluations")


def active_jobs(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the jobs of these that wait or run, or whose state is unknown, with their states."""
    states = {job: job_state(job) for job in jobs}
    return {job: state for job, state in states.items() if not state.is_over}


def run_job_state(run: Path) -> JobState:
    """The state of a run's jobs: the one that runs, else the next to run, else what became of the last.

    Where the scheduler doesn't say, the run's own record is believed only if it says that nothing goes on.
    """
    jobs, tasks = job_ids(run), int(number_of(read_launch_record(run), "array") or 1)
    states = [(job, job_state(job, tasks)) for job in jobs]
    living = [(job, state) for job, state in states if not (state.is_over or state.is_unknown)]
    for is_wanted in (lambda state: state.name == "RUNNING", lambda state: True):
        for job, state in living:
            if is_wanted(state):
                n_waiting = len(living) - 1
                details = [f"job {job}", state.reason, f"{n_waiting} more in the chain" if n_waiting else ""]
                return JobState(state.name, ", ".join(part for part in details if part), state.since)
    if not states:
        return JobState(UNKNOWN, "no job was noted")
    attempts = [attempt for attempt in AttemptLog(run).attempts if attempt.job in jobs]
    unknown = [(job, state) for job, state in states if state.is_unknown]
    job, state = (unknown or states)[-1]
    if (
        attempts
        and attempts[-1].ended is not None
        and (not unknown or attempts[-1].code in FINAL_EXIT_REASONS)
    ):
        last = attempts[-1]
        job, state = next((job, state) for job, state in states if job == last.job)
        if not state.name.startswith("CANCELLED"):
            return JobState(last.state_name, f"job {job}: {last.reason}", last.ended)
    return JobState(state.name, f"job {job}: {state.reason}" if state.reason else f"job {job}")


def _explain_pending(job: str, reason: str) -> str:
    """Why a job waits, and what helps where waiting does not. Versions of SLURM write `_` or a blank."""
    plain = reason.replace("_", " ")
    advice = next((text for start, text in PENDING_ADVICE.items() if plain.startswith(start)), "")
    return f"{reason}: {advice.format(job=job)}" if advice else reason


def _describe_array(job: str, rows: Sequence[Sequence[str]], count: int) -> str:
    """Count the tasks of an array that run, wait and are over, in words."""
    running = [row[2] for row in rows if row[0] == "RUNNING"]
    pending = [row for row in rows if row[0] == "PENDING"]
    parts = [
        f"{len(running)} of {count} tasks run on {', '.join(sorted(set(running)))}" if running else "",
        f"{len(pending)} wait ({_explain_pending(job, pending[0][1])})" if pending else "",
        f"{n_over} are over" if (n_over := count - len(rows)) > 0 else "",
    ]
    return "; ".join(filter(None, parts)) or f"{len(rows)} tasks are ending"


def job_state(job: str, tasks: int = 1) -> JobState:
    """State of a job by SLURM: from squeue while it is queued, then scontrol for a while, then sacct if there is one.

    tasks: how many there are in its array.
    """
    try:
        line = scheduler.run_slurm_command("squeue", "-h", "-a", "-r", "-j", job, "-o", "%T|%r|%N")
    except UsageError:
        return JobState(UNKNOWN, "squeue is not on PATH here")
    except MegatfmError as error:
        if "Invalid job id" not in str(error):
            return JobState(UNKNOWN, str(error))
        line = ""
    if rows := [row.split("|") for row in line.splitlines() if row.count("|") == 2]:
        words = {row[0] for row in rows}
        word = "RUNNING" if "RUNNING" in words else rows[0][0]
        row = next(row for row in rows if row[0] == word)
        if word == "STOPPED":  # which is our word for a run that saved and ended
            return JobState(
                "SUSPENDED", f"SIGSTOP stopped it on {row[2]}: `scancel -s CONT {job}` lets it go on"
            )
        if tasks > 1:
            return JobState(word, _describe_array(job, rows, tasks))
        return JobState(word, row[2] if word == "RUNNING" else _explain_pending(job, row[1]))
    try:
        record = scheduler.show_job(job)
    except MegatfmError as error:
        return JobState(UNKNOWN, str(error))
    if record:
        exit_code = record.get("ExitCode", "")
        return JobState(record.get("JobState", UNKNOWN), f"exit code {exit_code}" if exit_code else "")
    try:
        past = scheduler.run_slurm_command(
            "sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode"
        ).split("\n")[0]
    except MegatfmError:
        past = ""
    if "|" in past:
        word, exit_code = past.split("|")
        return JobState(word, f"exit code {exit_code}")
    return JobState("GONE", "SLURM has forgotten it")


# --- other jobs and processes of a run -------------------------------------------------------------------------------


def refuse_concurrent_launch(job: Job) -> list[str]:
    """Raise if the run already has an active job of this kind; return the ids of its active evaluation jobs.

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
        purpose = "evaluates this run" if job.kind == "evaluate" else "is of this run"
        doing = "runs" if state.name == "RUNNING" else f"is in the queue ({state.name})"
        end = number if job.kind == "evaluate" else shlex.quote(str(run))
        other_name = "" if job.kind == "evaluate" else ", or give this one another name"
        raise UsageError(
            f"{run}: job {number} {purpose}, and {doing}: wait for it, or end it with "
            f"`megatfm cancel {end}`{other_name}"
        )
    return list(evaluations)


def check_no_process(run: Path) -> None:
    """Refuse a run that a process of this machine has launched. Raises LockedError."""
    if process := launcher_process(run):
        raise LockedError(f"{run}: process {process.pid} runs this already: wait for it or give another name")


def launcher_process(run: Path) -> psutil.Process | None:
    """The process that launched a run, if it lives on this machine."""
    launch_record = read_launch_record(run)
    if launch_record.get("host") != socket.gethostname() or "pid" not in launch_record:
        return None
    try:
        process = psutil.Process(int(number_of(launch_record, "pid") or 0))
        is_same_job = (
            abs(process.create_time() - (number_of(launch_record, "started") or 0)) < 1
        )  # else the number was used again
        return process if is_same_job and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError, OverflowError):
        return None


def foreground_state(run: Path) -> JobState:
    """State of a run that a process launched: RUNNING while that process lives; else how it ended."""
    launch_record = read_launch_record(run)
    if launcher_process(run):
        return JobState(
            "RUNNING",
            f"pid {launch_record['pid']} on {launch_record['host']}",
            number_of(launch_record, "time"),
        )
    ended = _recorded_end(run)
    if launch_record.get("host") != socket.gethostname() and not ended:
        return JobState(UNKNOWN, f"started on {launch_record.get('host')}: ask there")
    return ended or JobState("FAILED", "its launcher is gone, and left no word")


def _recorded_end(run: Path) -> JobState | None:
    """The end that the last attempt or the run's last event records."""
    attempts = AttemptLog(run).attempts
    if attempts and (last := attempts[-1]).ended is not None:
        return JobState(last.state_name, last.reason, last.ended)
    events = tail_jsonl(run / EVENTS, 1)
    if events and (word := LAST_EVENT_STATES.get(str(events[0].get("event")))):
        return JobState(word, str(events[0].get("detail", "")), number_of(events[0], "time"))
    return None


def cancel(run: Path) -> str:
    """End all that was launched for a run: every job, and the process here, which saves first. Return what was done.

    Raises UsageError if there is nothing to end.
    """
    cancelled, jobs = [], list(active_jobs([*job_ids(run), *evaluation_job_ids(run)]))
    if jobs:
        cancelled.append(_scancel(jobs))
    if process := launcher_process(run):
        try:
            process.send_signal(signal.SIGTERM)
        except psutil.AccessDenied:
            raise UsageError(
                f"{run}: process {process.pid} is of {process.username()}, who alone can end it (or root)"
            ) from None
        except psutil.NoSuchProcess:
            pass  # ended at this moment
        cancelled.append(f"told process {process.pid} to save and stop")
    if not cancelled:
        raise UsageError(f"{run}: {_why_nothing_runs(run)}")
    return ", ".join(cancelled)


def cancel_job_id(number: str) -> str:
    """Cancel the run that a SLURM job belongs to; a job that evaluates, or that no run records, is cancelled alone.

    Raises UsageError for a job that megatfm didn't submit.
    """
    record = scheduler.show_job(number)
    script, log = Path(record.get("Command", "")), Path(record.get("StdOut", ""))
    run = log.parent.parent
    is_slurm_log = script.parent == run / "slurm" and re.fullmatch(r"slurm-.*\.log", log.name)
    if not record or not is_slurm_log:
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
