"""How the jobs of a run are, from the queue, and from what is left once SLURM has forgotten them."""

from collections.abc import Sequence
from pathlib import Path

from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.files import number_of, read_launch_record, texts_of
from megatfm.launchers.job import UNKNOWN, JobState
from megatfm.launchers.restarts import FINAL_EXIT_REASONS, AttemptLog

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
    """Jobs of these that wait or run, and those of which nobody can tell, and how they are."""
    states = {job: job_state(job) for job in jobs}
    return {job: state for job, state in states.items() if not state.is_over}


def run_job_state(run: Path) -> JobState:
    """The state of a run's jobs: the one that runs, else the next to run, else what became of the last.

    Where the scheduler doesn't say, the run's own record is believed only if it says that nothing goes on.
    """
    jobs, tasks = job_ids(run), int(number_of(read_launch_record(run), "array") or 1)
    states = [(job, job_state(job, tasks)) for job in jobs]
    living = [(job, state) for job, state in states if not (state.is_over or state.is_unknown)]
    for wanted in (lambda state: state.name == "RUNNING", lambda state: True):
        for job, state in living:
            if wanted(state):
                waiting = len(living) - 1
                more = [f"job {job}", state.reason, f"{waiting} more in the chain" if waiting else ""]
                return JobState(state.name, ", ".join(part for part in more if part), state.since)
    if not states:
        return JobState(UNKNOWN, "no job was noted")
    attempts = [each for each in AttemptLog(run).attempts if each.job in jobs]
    unknown = [each for each in states if each[1].is_unknown]
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
    """How many tasks of an array run, wait and are over."""
    running = [row[2] for row in rows if row[0] == "RUNNING"]
    waiting = [row for row in rows if row[0] == "PENDING"]
    parts = [
        f"{len(running)} of {count} tasks run on {', '.join(sorted(set(running)))}" if running else "",
        f"{len(waiting)} wait ({_explain_pending(job, waiting[0][1])})" if waiting else "",
        f"{over} are over" if (over := count - len(rows)) > 0 else "",
    ]
    return "; ".join(filter(None, parts)) or f"{len(rows)} tasks are ending"


def job_state(job: str, tasks: int = 1) -> JobState:
    """What SLURM says of a job: squeue while it is queued, then scontrol for a while, then sacct where there is one.

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
        found = scheduler.show_job(job)
    except MegatfmError as error:
        return JobState(UNKNOWN, str(error))
    if found:
        exit_code = found.get("ExitCode", "")
        return JobState(found.get("JobState", UNKNOWN), f"exit code {exit_code}" if exit_code else "")
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
