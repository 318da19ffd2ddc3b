"""Jobs and processes of a run: report their state, refuse a second launch, cancel them.

A job's state comes from SLURM, and from the run's own files once SLURM has forgotten the job.
"""

import math
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megatfm.errors import EXIT_OK, EXIT_REQUEUE, LockedError, MegatfmError, UsageError
from megatfm.files import is_copied_record
from megatfm.launchers import scheduler
from megatfm.launchers.attempts import FINAL_EXIT_REASONS, AttemptLog
from megatfm.launchers.job import UNKNOWN, Job, JobState
from megatfm.launchers.record import (
    EVENT_STATES,
    LAUNCH,
    get_finite_number,
    get_texts,
    read_json_if_valid,
    read_last_state_event,
    read_launch_record,
)

HELD_ADVICE = "it is held: `scontrol release {job}` releases it"
RELAUNCH = "cancel it, and launch with"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File of Linux with an id that each start of the machine has anew."""
HEARTBEAT_SECONDS = 30.0
"""Age at which a lock counts as abandoned: a run that trains touches its lock every few seconds."""
CLOCK_SKEW_SECONDS = 60.0
"""Largest assumed difference between the clocks of two machines."""
PENDING_ADVICE = {
    "JobHeldUser": HELD_ADVICE,
    "JobHeldAdmin": "the site holds it, or it was requeued too often: ask, or `scontrol release {job}`",
    "launch failed requeued held": "a node could not start it, so SLURM holds it: `scontrol release {job}`",
    "job requeued in held state": HELD_ADVICE,
    "PartitionTimeLimit": f"its time limit is above the partition's: {RELAUNCH} less --time",
    "PartitionNodeLimit": f"it requests more nodes than the partition allows: {RELAUNCH} fewer --nodes or another "
    "--partition",
    "PartitionDown": f"the partition is closed: wait until it opens, or {RELAUNCH} another --partition",
    "PartitionInactive": f"the partition is closed: {RELAUNCH} another --partition",
    "BadConstraints": f"no node has the requested features: {RELAUNCH} fewer",
    "DependencyNeverSatisfied": "the job that it waits for failed: cancel it",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved: `sinfo -R` says why",
    "Nodes required for job are DOWN, DRAINED or reserved": "`sinfo -R` says why",
}
"""Advice for reasons of squeue that need action: beginning of the reason → meaning and remedy."""


def read_job_ids(run: Path) -> list[str]:
    """Return the ids of the jobs of a run's last submission, in chain order."""
    return get_texts(read_launch_record(run), "jobs")


def read_evaluation_job_ids(run: Path) -> list[str]:
    """Return the ids of a run's evaluation jobs, including ended ones."""
    return get_texts(read_launch_record(run), "evaluations")


def find_active_jobs(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return those of the jobs that wait, run or have an unknown state: job id → state."""
    states = {job: get_job_state(job) for job in jobs}
    return {job: state for job, state in states.items() if not state.is_over}


def find_active_evaluations(run: Path) -> dict[str, JobState]:
    """Return the evaluation jobs of a run that wait, run or have an unknown state: job id → state."""
    return find_active_jobs(read_evaluation_job_ids(run))


def get_run_job_state(run: Path) -> JobState:
    """Return the state of a run's jobs: of the running one, else the next pending one, else the last.

    While the scheduler doesn't answer, the run's own record counts only if it says that the run has ended for good.
    """
    jobs, tasks = read_job_ids(run), int(get_finite_number(read_launch_record(run), "array") or 1)
    states = [(job, get_job_state(job, tasks)) for job in jobs]
    active = [(job, state) for job, state in states if not (state.is_over or state.is_unknown)]
    if active:
        job, state = next((pair for pair in active if pair[1].name == "RUNNING"), active[0])
        n_waiting = len(active) - 1
        details = [f"job {job}", state.reason, f"{n_waiting} more in the chain" if n_waiting else ""]
        return JobState(state.name, ", ".join(filter(None, details)), state.since)
    if not states:
        return JobState(UNKNOWN, "no job is recorded")
    attempts = [attempt for attempt in AttemptLog(run).attempts if attempt.job in jobs]
    unknown = [(job, state) for job, state in states if state.is_unknown]
    job, state = (unknown or states)[-1]
    last = attempts[-1] if attempts else None
    if last and last.ended is not None and (not unknown or last.code in FINAL_EXIT_REASONS):
        job, state = next((job, state) for job, state in states if job == last.job)
        if not state.name.startswith("CANCELLED"):
            return JobState(last.state_name, f"job {job}: {last.reason}", last.ended)
    return JobState(state.name, f"job {job}: {state.reason}" if state.reason else f"job {job}")


def _explain_pending(job: str, reason: str) -> str:
    """Return squeue's reason why a job waits, with advice if the job needs action."""
    plain = reason.replace("_", " ")  # depends on SLURM's version
    advice = next((text for start, text in PENDING_ADVICE.items() if plain.startswith(start)), "")
    return f"{reason}: {advice.format(job=job)}" if advice else reason


def _describe_array(job: str, rows: Sequence[Sequence[str]], count: int) -> str:
    """Describe how many tasks of an array are running, waiting and ended."""
    running = [row[2] for row in rows if row[0] == "RUNNING"]
    pending = [row for row in rows if row[0] == "PENDING"]
    clauses = [
        f"{len(running)} of {count} tasks running on {', '.join(sorted(set(running)))}" if running else "",
        f"{len(pending)} waiting ({_explain_pending(job, pending[0][1])})" if pending else "",
        f"{n_over} ended" if (n_over := count - len(rows)) > 0 else "",
    ]
    return "; ".join(filter(None, clauses)) or f"{len(rows)} ending"


def get_job_state(job: str, tasks: int = 1) -> JobState:
    """Ask SLURM for a job's state: squeue while it is queued, scontrol for a while after, then sacct if installed.

    tasks: number of tasks in the job's array.
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
        name, reason, nodes = next((row for row in rows if row[0] == "RUNNING"), rows[0])
        if name == "STOPPED":  # megatfm uses this name for a run that saved and ended
            return JobState("SUSPENDED", f"SIGSTOP stopped it on {nodes}: `scancel -s CONT {job}` continues it")
        if tasks > 1:
            return JobState(name, _describe_array(job, rows, tasks))
        return JobState(name, nodes if name == "RUNNING" else _explain_pending(job, reason))
    try:
        record = scheduler.show_job(job)
    except MegatfmError as error:
        return JobState(UNKNOWN, str(error))
    if record:
        return JobState(record.get("JobState", UNKNOWN), _explain_exit_code(record.get("ExitCode", "")))
    try:
        past = scheduler.run_slurm_command("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode").split("\n")[0]
    except MegatfmError:
        past = ""
    if "|" in past:
        name, exit_code = past.split("|")
        return JobState(name, _explain_exit_code(exit_code))
    return JobState("GONE", "SLURM has forgotten it")


def _explain_exit_code(exit_code: str) -> str:
    """Return SLURM's exit code, "CODE:SIGNAL", in words; empty if there is none. Its own signal 125 has no name."""
    code, _, number = exit_code.partition(":")
    if number.isdecimal() and int(number) in {*signal.Signals}:
        return f"ended by {signal.Signals(int(number)).name}"
    return f"exit code {code if number == '0' else exit_code}" if code else ""


# --- other jobs and processes of a run -------------------------------------------------------------------------------


def refuse_concurrent_launch(job: Job) -> list[str]:
    """Raise if the run already has an active job of this kind; return the ids of its active evaluation jobs.

    A second submission would overwrite the config that a queued job reads when it starts, and its launch record.
    Raises LockedError for a process, UsageError for a SLURM job.
    """
    run = job.run_dir
    if job.kind != "evaluate":
        check_no_process(run)
    evaluations = find_active_evaluations(run)
    conflicting = evaluations if job.kind == "evaluate" else find_active_jobs(read_job_ids(run))
    for job_id, state in conflicting.items():
        if state.is_unknown:
            raise UsageError(
                f"{run}: it is unknown whether job {job_id} still waits or runs ({state.reason}): try again, or on a "
                f"machine where SLURM answers; give this run another name; or, if the job is gone, delete "
                f"{run / LAUNCH}"
            )
        purpose = "evaluates this run" if job.kind == "evaluate" else "is of this run"
        activity = "runs" if state.name == "RUNNING" else f"is in the queue ({state.name})"
        target = job_id if job.kind == "evaluate" else shlex.quote(str(run))
        other_name = "" if job.kind == "evaluate" else ", or give this run another name"
        raise UsageError(
            f"{run}: job {job_id} {purpose}, and {activity}: wait for it, or end it with "
            f"`megatfm cancel {target}`{other_name}"
        )
    return list(evaluations)


def check_no_process(run: Path) -> None:
    """Raise LockedError if a process on this machine has launched the run and still lives."""
    if process := find_launcher_process(run):
        raise LockedError(f"{run}: process {process.pid} runs this already: wait for it or give another name")


def describe_process(process: psutil.Process) -> dict[str, Any]:
    """Return a process's pid and start: `started` in seconds since 1970, by the clock as it is set now, and `uptime` in
    seconds since the machine started; `boot` tells this start of the machine from others ("" where that is unknown)."""
    started = process.create_time()
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return {"pid": process.pid, "started": started, "uptime": started - psutil.boot_time(), "boot": boot}


def find_launcher_process(run: Path) -> psutil.Process | None:
    """Return the process that launched a run, if it lives on this machine."""
    launch_record = read_launch_record(run)
    if launch_record.get("host") != socket.gethostname() or "pid" not in launch_record:
        return None
    try:
        process = psutil.Process(int(get_finite_number(launch_record, "pid") or 0))
        # If the start time differs, another process has the pid now, unless the clock was set since.
        description = describe_process(process)
        is_same_boot = bool(description["boot"]) and description["boot"] == launch_record.get("boot")
        keys = ("started", "uptime") if is_same_boot else ("started",)
        is_same = any(abs(description[key] - (get_finite_number(launch_record, key) or 0)) < 1 for key in keys)
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError, OverflowError):
        return None


def get_foreground_state(run: Path) -> JobState:
    """Return the state of a run without SLURM: RUNNING while its launcher process lives, else its recorded end."""
    launch_record = read_launch_record(run)
    if find_launcher_process(run):
        return JobState(
            "RUNNING",
            f"pid {launch_record['pid']} on {launch_record['host']}",
            get_finite_number(launch_record, "time"),
        )
    ended = _read_recorded_end(run)
    if launch_record.get("host") != socket.gethostname() and not ended:
        return JobState(UNKNOWN, f"started on {launch_record.get('host')}: run this command there")
    return ended or JobState("FAILED", "its launcher process is gone, and recorded no end")


def _read_recorded_end(run: Path) -> JobState | None:
    """Return the end that the last attempt, the run's last event or a preparation's launcher records."""
    attempts = AttemptLog(run).attempts
    if attempts and (last := attempts[-1]).ended is not None:
        return JobState(last.state_name, last.reason, last.ended)
    event = read_last_state_event(run)
    if (name := EVENT_STATES.get(str(event.get("event")), "ENDED")) != "ENDED":
        return JobState(name, str(event.get("detail", "")), get_finite_number(event, "time"))
    launch_record = read_launch_record(run)
    if (code := get_finite_number(launch_record, "exit_code")) is None:
        return None
    name = {EXIT_OK: "DONE", EXIT_REQUEUE: "STOPPED"}.get(int(code), "FAILED")
    return JobState(name, f"exit code {int(code)}", get_finite_number(launch_record, "time"))


def get_locked_state(run: Path) -> JobState | None:
    """Return the state of a run that a process trains, however it was started; None if its lock isn't held.

    SLURM knows sooner when one of the run's jobs is over: its last heartbeat may be half a minute old.
    """
    holder = read_json_if_valid(run / "lock", {})
    if not isinstance(holder, dict) or "pid" not in holder or holder.get("job") in read_job_ids(run):
        return None
    if not _is_lock_held(run, holder):
        return None
    return JobState("RUNNING", f"pid {holder['pid']} on {holder.get('host')}", get_finite_number(holder, "time"))


def _is_lock_held(run: Path, holder: dict[str, Any]) -> bool:
    """Return whether a run's lock is held: by a live process here, or on another machine by a recent heartbeat."""
    if is_copied_record(holder, run):
        return False
    if holder.get("host") == socket.gethostname():
        lock_time, pid = get_finite_number(holder, "time"), get_finite_number(holder, "pid")
        try:
            # A process that began after the lock was taken has only inherited the pid of a dead one.
            return pid is not None and psutil.Process(int(pid)).create_time() < (lock_time or math.inf) + 1
        except (psutil.Error, ValueError, OverflowError):
            return False
    try:
        last_heartbeat = (run / "lock").stat().st_mtime
    except OSError:
        return False
    try:  # measure the age by the file server's clock, from which this machine's may differ
        probe = run / f".now.{os.getpid()}"
        probe.touch()
        age = probe.stat().st_mtime - last_heartbeat
        probe.unlink()
        return age < HEARTBEAT_SECONDS
    except OSError:  # the directory is not writable
        return time.time() - last_heartbeat < HEARTBEAT_SECONDS + CLOCK_SKEW_SECONDS


def cancel_run(run: Path) -> str:
    """Cancel all jobs of a run; tell its launcher process on this machine to save and stop. Return a summary.

    Raises UsageError if neither a job nor a process is left.
    """
    cancelled, jobs = [], list(find_active_jobs([*read_job_ids(run), *read_evaluation_job_ids(run)]))
    if jobs:
        cancelled.append(_cancel_jobs(jobs))
    if process := find_launcher_process(run):
        try:
            process.send_signal(signal.SIGTERM)
        except psutil.AccessDenied:
            raise UsageError(
                f"{run}: process {process.pid} belongs to {process.username()}: only they and root can end it"
            ) from None
        except psutil.NoSuchProcess:
            pass  # it has just ended
        cancelled.append(f"told process {process.pid} to save and stop")
    if not cancelled:
        raise UsageError(f"{run}: {_explain_no_jobs(run)}")
    return ", ".join(cancelled)


def cancel_job_id(job_id: str) -> str:
    """Cancel the run that a SLURM job belongs to. An evaluation job, and a job no run records, is cancelled alone.

    Raises UsageError for a job that megatfm didn't submit.
    """
    record = scheduler.show_job(job_id)
    script, log = Path(record.get("Command", "")), Path(record.get("StdOut", ""))
    run = log.parent.parent
    is_slurm_log = script.parent == run / "slurm" and re.fullmatch(r"slurm-.*\.log", log.name)
    if not record or not is_slurm_log:
        raise UsageError(
            f"{job_id}: {'not a job of `megatfm launch`' if record else 'SLURM knows no such job'}: give a run "
            f"directory or a job's number{f', or end it with `scancel {job_id}`' if record else ''}"
        )
    if job_id in read_job_ids(run):
        return cancel_run(run)
    if not (jobs := list(find_active_jobs([job_id]))):
        raise UsageError(f"job {job_id} of {run} is over")
    return _cancel_jobs(jobs)


def _cancel_jobs(jobs: Sequence[str]) -> str:
    scheduler.cancel_jobs(jobs)
    return f"cancelled job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"


def _explain_no_jobs(run: Path) -> str:
    launch_record = read_launch_record(run)
    if launch_record.get("host") not in (None, socket.gethostname()):
        return f"was started on {launch_record['host']}: cancel it there"
    if state := get_locked_state(run):
        return f"was not started by `megatfm launch`: send its process ({state.reason}) SIGTERM, and it saves and stops"
    if launch_record.get("launcher") == "slurm" or launch_record.get("evaluations"):
        return "none of its jobs is in the queue"
    return "nothing runs"
