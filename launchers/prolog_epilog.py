"""Prolog and epilog of the batch script: choose the nodes of an attempt, then requeue the job or stop.

`python -m megatfm.launchers.prolog_epilog prolog …` prints `N_NODES HEAD_NODE NODE_LIST` for srun, or nothing if the
run is finished. `… epilog …` requeues the job, leaves the run to the next job of its chain, or stops. `… requeue …`
requeues a stopped task of a preparation. All three log their decision and its reason to stderr, which is the job's log,
and exit with the code with which the job shall end.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from megatfm.config import Config, load_config
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, NO_PROGRESS, MegatfmError, UsageError
from megatfm.files import atomic_write
from megatfm.launchers import scheduler
from megatfm.launchers.attempts import (
    FINAL_EXIT_REASONS,
    MAX_STOPS_WITHOUT_PROGRESS,
    RESTARTS,
    UNFINISHED,
    Attempt,
    AttemptLog,
)
from megatfm.launchers.record import (
    EVENTS,
    find_latest_checkpoint_step,
    get_number,
    get_texts,
    is_finished,
    read_json_if_valid,
    tail_jsonl,
)
from megatfm.launchers.run_jobs import get_job_state, read_job_ids
from megatfm.launchers.status import describe_prep_progress
from megatfm.launchers.validation import explain_layout_error, find_max_fitting_nodes
from megatfm.terminal import print_to_stderr

T = TypeVar("T")

PREFIX = "megatfm job: "
RETRY_SECONDS = (5.0, 15.0, 45.0)
"""Waits before SLURM is asked again: a busy controller often times out, and without its answer the run would end."""
LOG_BYTES = 2**24
"""Bytes at the end of a log that are searched for SLURM's messages."""
PROLOG_MARK = f"{PREFIX}attempt"
# srun's messages name the node and how its tasks ended.
_TASK_ENDED = re.compile(r"^srun: error: ([\w.-]+): tasks? (\d+)(?:[-,\d]*): (.+)$", re.MULTILINE)
_NOT_LAUNCHED = re.compile(r"^srun: error: Task launch for \S+ failed on node ([\w.-]+): (.+)$", re.MULTILINE)
_LOST_NODE = re.compile(r"^srun: error: Node failure on ([\w.-]+)", re.MULTILINE)
_JOB_ENDED = re.compile(
    r"^slurmstepd.*\*\*\* JOB \d+ ON \S+ CANCELLED AT (\d{4}-\S+)(?: DUE TO ([A-Z ]+))?", re.MULTILINE
)
_KILLED_BY_SIGNAL = re.compile(r"Segmentation fault|Bus error|Aborted|Illegal instruction|Killed|Floating point")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the prolog, the epilog or the requeue of a prep task; return the exit code."""
    parser = argparse.ArgumentParser(prog="megatfm.launchers.prolog_epilog", description=__doc__)
    actions = parser.add_subparsers(required=True, dest="action")
    actions.add_parser("requeue").add_argument("--run", type=Path, required=True)
    for name in ("prolog", "epilog"):
        action = actions.add_parser(name)
        action.add_argument("--run", type=Path, required=True)
        action.add_argument("--log", type=Path, required=True)
        action.add_argument("--config", type=Path, required=True)
        action.add_argument("--max-restarts", type=int, required=True)
        if name == "prolog":
            action.add_argument("--min-nodes", type=int, required=True)
            action.add_argument("--processes-per-node", type=int, required=True)
        else:
            action.add_argument("--code", type=int, required=True)
            action.add_argument("--asked", default="", help="signal that told the job to stop")
            action.add_argument("--requeue", action=argparse.BooleanOptionalAction, required=True)
    args = parser.parse_args(argv)
    try:
        return {"prolog": prolog, "epilog": epilog, "requeue": requeue_prep_task}[args.action](args)
    except (MegatfmError, OSError) as error:
        log(f"error: {error}")
        return error.exit_code if isinstance(error, MegatfmError) else EXIT_FAILED


def prolog(args: argparse.Namespace) -> int:
    """Record a new attempt; print the nodes to use, or nothing if the run is finished or must stop."""
    config = load_config(args.config)
    nodes = scheduler.expand_nodelist(os.environ["SLURM_JOB_NODELIST"])
    attempt_log, now = AttemptLog(args.run), time.time()
    if find_latest_checkpoint_step(args.run) >= config.train.steps and is_finished(args.run, config.train.steps):
        log(f"the run is finished: all of its {config.train.steps} steps are done")
        return EXIT_OK
    job = os.environ["SLURM_JOB_ID"]
    submission = get_submission_id(args.run, job)
    if unfinished := attempt_log.find_unfinished_attempt(submission):
        cause = find_failure_cause(args.log, args.run, unfinished.time)
        batch_host = f" on {unfinished.nodes[0]}" if unfinished.nodes else ""
        ended_attempt = attempt_log.end(
            replace(
                unfinished,
                ended=now,
                asked=cause.ended_by_slurm,
                reason=cause.reason or f"its job script{batch_host} was killed",
                failed_host=cause.host,
                failed_rank=cause.rank,
            )
        )
        log(f"the attempt before: {ended_attempt.reason}; the newest checkpoint is of step {ended_attempt.step}")
    attempt = attempt_log.begin(Attempt(now, submission, job, _read_restart_count(), nodes))
    n_attempts = sum(earlier.submission == submission for earlier in attempt_log.attempts)
    log(f"attempt {n_attempts}: job {job}, from step {attempt.first_step}, on {', '.join(nodes)}")
    if limit_reason := attempt_log.explain_restart_limit(submission, args.max_restarts):
        # Only after SLURM itself has requeued the job, since then no epilog ran.
        return _stop_without_progress(args, attempt_log, attempt, limit_reason)
    usable = _select_usable_nodes(args, config, nodes, set(attempt_log.find_faulty_hosts(now)))
    count = find_max_fitting_nodes(config, range(args.min_nodes, len(usable) + 1), args.processes_per_node)
    error = explain_layout_error(config, len(usable) * args.processes_per_node)
    if count is None:
        attempt_log.end(replace(attempt, code=EXIT_USAGE, ended=now, reason=error or "too few nodes"))
        log(f"error: the run fits on none of {args.min_nodes} to {len(usable)} nodes: on {len(usable)}, {error}")
        return EXIT_USAGE
    if count < len(nodes):
        log(f"trains on {count} of {len(nodes)} nodes{f': {error}' if error else ''}")
    print(count, usable[0], ",".join(usable[:count]))
    return EXIT_OK


def _select_usable_nodes(
    args: argparse.Namespace, config: Config, nodes: Sequence[str], faulty_hosts: set[str]
) -> Sequence[str]:
    """Return the job's nodes without faulty ones; all of them if the run doesn't fit on the others."""
    usable, faulty = [node for node in nodes if node not in faulty_hosts], sorted(faulty_hosts & set(nodes))
    if not faulty:
        return nodes
    counts = range(args.min_nodes, len(usable) + 1)
    if find_max_fitting_nodes(config, counts, args.processes_per_node) is None:
        log(f"{', '.join(faulty)}: failed before but used again: too few other nodes are left")
        return nodes
    log(f"{', '.join(faulty)}: not used, since the run failed there before")
    return usable


def epilog(args: argparse.Namespace) -> int:
    """Record how the attempt ended; requeue the job, leave the run to the next job of its chain, or stop."""
    attempt_log, job = AttemptLog(args.run), os.environ["SLURM_JOB_ID"]
    started_attempt = attempt_log.find_attempt_of_job(job, _read_restart_count())
    if started_attempt is None:  # somebody removed the file, or another job replaced it at the same moment
        log(f"{RESTARTS} lacks this attempt: recorded anew")
        submission, step = get_submission_id(args.run, job), find_latest_checkpoint_step(args.run)
        started_attempt = Attempt(time.time(), submission, job, _read_restart_count(), first_step=step)
    code = args.code
    # A rank dies of USR1 if the signal arrives before its handler is installed.
    stop_signal = args.asked or ("USR1" if code == 128 + signal.SIGUSR1 else "")
    if code in (EXIT_OK, EXIT_REQUEUE) or stop_signal:  # the signal may have come after the last step
        has_finished = is_finished(args.run, load_config(args.config).train.steps)
        code = EXIT_OK if has_finished else code or EXIT_FAILED
    attempt = replace(started_attempt, ended=time.time(), code=code, asked=bool(stop_signal))
    if code in FINAL_EXIT_REASONS:
        attempt_log.end(replace(attempt, asked=False, reason=FINAL_EXIT_REASONS[code]))
        log(f"the run ended with {code}: {FINAL_EXIT_REASONS[code]}")
        if code in (EXIT_OK, EXIT_USAGE, NO_PROGRESS):
            _cancel_later_chain_jobs(args.run, job)
        return int(code)
    if stop_signal or code == EXIT_REQUEUE:
        attempt = replace(attempt, reason=f"stopped by {stop_signal or 'a signal'}")
    else:
        next_attempt = attempt_log.find_next_attempt(started_attempt)
        next_started_at = next_attempt.time if next_attempt else None
        cause = find_failure_cause(args.log, args.run, started_attempt.time, next_started_at)
        reason = cause.reason or (f"exit code {code}" if args.code else UNFINISHED)
        attempt = replace(attempt, failed_host=cause.host, failed_rank=cause.rank, reason=reason)
    attempt = attempt_log.end(attempt)
    log(f"{attempt.reason}; the newest checkpoint is of step {attempt.step}")
    if limit_reason := attempt_log.explain_restart_limit(attempt.submission, args.max_restarts):
        return _stop_without_progress(args, attempt_log, attempt, limit_reason)
    _requeue_or_chain(args, attempt_log, attempt)
    return EXIT_FAILED if attempt.is_failure else EXIT_REQUEUE


def requeue_prep_task(args: argparse.Namespace) -> int:
    """Requeue a stopped task of a preparation, unless repeated stops passed without any task finishing a part."""
    job, task = os.environ["SLURM_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    stops_file, array_job = args.run / "slurm" / f"stops.{task}.json", os.environ["SLURM_ARRAY_JOB_ID"]
    previous, progress = read_json_if_valid(stops_file, {}), describe_prep_progress(args.run)
    stops = 1
    if isinstance(previous, dict) and (previous.get("job"), previous.get("work")) == (array_job, progress):
        stops += previous["stops"] if isinstance(previous.get("stops"), int) else 0
    try:
        atomic_write(stops_file, json.dumps({"job": array_job, "work": progress, "stops": stops}) + "\n")
    except OSError as error:  # a full disk must not keep the task from going on
        log(f"{stops_file}: can't be written: {error.strerror}")
    if stops > MAX_STOPS_WITHOUT_PROGRESS:
        log(
            f"no progress: task {task} was stopped {stops} times in a row, and no task finished a part: give more "
            "--time"
        )
        return NO_PROGRESS
    if ask_slurm(lambda: _get_known_state(job)) == "RUNNING":  # else it was cancelled
        ask_slurm(lambda: scheduler.requeue(job))
        log(f"task {task} is requeued, and will continue")
    return EXIT_REQUEUE


def ask_slurm(ask: Callable[[], T]) -> T:
    """Return SLURM's answer; ask again where it gives none. Raises MegatfmError after the last time."""
    for seconds in RETRY_SECONDS:
        try:
            return ask()
        except UsageError:
            raise
        except MegatfmError as error:
            log(f"{error}: asking again in {seconds:.0f} s")
            time.sleep(seconds)
    return ask()


def _get_known_state(job: str) -> str:
    """Return the name of a job's state. Raises MegatfmError if it is unknown."""
    state = get_job_state(job)
    if state.is_unknown:
        raise MegatfmError(state.reason)
    return state.name


def _requeue_or_chain(args: argparse.Namespace, attempt_log: AttemptLog, attempt: Attempt) -> None:
    """Requeue the job, or leave the run to the next job of its chain; exclude nodes that failed twice."""
    job = attempt.job
    record = ask_slurm(lambda: scheduler.show_job(job))
    state = record.get("JobState", "")
    is_out_of_time = (scheduler.parse_time(record.get("RunTime", "")) or 0) >= (
        scheduler.parse_time(record.get("TimeLimit", "")) or sys.maxsize
    )
    is_requeued = int(record.get("Restarts", "0")) > attempt.restart
    if not is_requeued and (state == "CANCELLED" or (state == "COMPLETING" and not is_out_of_time)):
        log(f"job {job} was cancelled, so it is not requeued")
        return
    next_jobs = list_later_chain_jobs(args.run, job)
    if is_requeued:
        log(f"SLURM has requeued job {job}")
        next_jobs = [job]
    elif args.requeue:
        ask_slurm(lambda: scheduler.requeue(job))
        log(f"job {job} is requeued, and will resume from its checkpoint")
        next_jobs = [job]
    elif next_jobs:
        log(f"the next job of the chain, {next_jobs[0]}, will resume from here")
    else:
        log("this site doesn't requeue jobs, and the chain has no further job: start the same command again")
    if (hosts := attempt_log.find_faulty_hosts(time.time())) and next_jobs:
        _exclude_hosts(next_jobs, hosts, record)


def _exclude_hosts(jobs: Sequence[str], hosts: Sequence[str], record: dict[str, str]) -> None:
    """Exclude hosts from jobs, if enough other nodes are left for the jobs to start."""
    try:
        current_list = record.get("ExcNodeList", "(null)")  # must be repeated, since an update replaces it
        excluded = {*hosts, *(scheduler.expand_nodelist(current_list) if current_list != "(null)" else ())}
        free_nodes = scheduler.list_usable_nodes(record.get("Partition", "")) - excluded
        n_nodes = int(re.match(r"\d+", record.get("NumNodes", "1"))[0])  # type: ignore[index]
        if len(free_nodes) < n_nodes:
            log(f"{', '.join(hosts)}: failed twice, but only {len(free_nodes)} other nodes are usable: not excluded")
            return
        for job in jobs:
            scheduler.set_excluded_nodes(job, sorted(excluded))
        log(f"{', '.join(hosts)}: failed twice, so excluded from now on")
    except MegatfmError as error:
        log(f"could not exclude {', '.join(hosts)}: {error}")


def _stop_without_progress(args: argparse.Namespace, attempt_log: AttemptLog, attempt: Attempt, reason: str) -> int:
    log(f"no progress: {reason}. Mend the cause, then launch again")
    attempt_log.end(replace(attempt, ended=time.time(), code=NO_PROGRESS, reason=reason))
    _cancel_later_chain_jobs(args.run, attempt.job)
    return NO_PROGRESS


def get_submission_id(run: Path, job: str) -> str:
    """Return the job under which restarts are counted: the first of the chain, or the job itself."""
    jobs = read_job_ids(run)
    return jobs[0] if job in jobs else job


def list_later_chain_jobs(run: Path, job: str) -> list[str]:
    """Return the jobs of a chain that were submitted after this one."""
    jobs = read_job_ids(run)
    return jobs[jobs.index(job) + 1 :] if job in jobs else []


def _cancel_later_chain_jobs(run: Path, job: str) -> None:
    later_jobs = list_later_chain_jobs(run, job)
    if not later_jobs:
        return
    try:
        scheduler.cancel_jobs(later_jobs)
    except MegatfmError as error:  # SLURM gives no answer, or has forgotten a job that ended
        log(f"could not cancel the later jobs of the chain, {', '.join(later_jobs)}: {error}")
    else:
        log(f"cancelled the later jobs of the chain: {', '.join(later_jobs)}")


@dataclass(frozen=True)
class FailureCause:
    """Cause of an attempt's end: host, rank and reason of the first failure, and whether SLURM ended the job."""

    host: str | None = None
    rank: int | None = None
    reason: str = ""
    ended_by_slurm: bool = False


def find_failure_cause(log: Path, run: Path, started_at: float, next_started_at: float | None = None) -> FailureCause:
    """Find out why an attempt ended, from the run's events, else from srun's messages in the job's log.

    started_at, next_started_at: start of this attempt and the next, in seconds since 1970; only events between them
    belong to this attempt.
    """
    text = _read_log_of_last_attempt(log)
    slurm_reason, until = "", next_started_at or sys.float_info.max
    if ended := _JOB_ENDED.search(text):  # SLURM kills the tasks after this message: their ends are no failures
        slurm_reason = (ended[2] or "cancelled").strip()
        until = min(until, datetime.fromisoformat(ended[1]).timestamp())
        text = text[: ended.start()]
    for event in reversed(tail_jsonl(run / EVENTS, 8)):
        if event.get("event") == "failed" and started_at <= (get_number(event, "time") or 0) < until:
            hosts, ranks = get_texts(event, "hosts"), get_texts(event, "ranks")
            is_single_rank = len(set(hosts)) == 1 and ranks and ranks[0].isdecimal()
            host, rank = (hosts[0], int(ranks[0])) if is_single_rank else (None, None)
            return FailureCause(host, rank, str(event.get("detail", "failed")))
    if lost_node := _LOST_NODE.search(text):
        return FailureCause(lost_node[1], None, f"node {lost_node[1]} failed")
    if node_reasons := {match[1]: match[2] for match in _NOT_LAUNCHED.finditer(text)}:
        # These nodes come first: srun then kills the tasks that did start, on healthy nodes.
        reasons = "; ".join(f"node {node} could not start its tasks: {reason}" for node, reason in node_reasons.items())
        return FailureCause(next(iter(node_reasons)) if len(node_reasons) == 1 else None, None, reasons)
    tasks = list(_TASK_ENDED.finditer(text))
    # A rank that a signal killed can't have failed because of another's failure.
    killed = [match for match in tasks if _KILLED_BY_SIGNAL.search(match[3])]
    if not killed and len({match[1] for match in tasks}) > 1:
        return FailureCause(reason=f"{tasks[0][3]} on several nodes")  # the first failure is unknown
    if first := next(iter(killed or tasks), None):
        return FailureCause(first[1], int(first[2]), f"rank {first[2]} on {first[1]}: {first[3]}")
    if slurm_reason:
        reason = f"ended by SLURM: {slurm_reason.lower()}"
        return FailureCause(reason=reason, ended_by_slurm=slurm_reason != "NODE FAILURE")
    return FailureCause()


def _read_log_of_last_attempt(log: Path) -> str:
    """Return the last LOG_BYTES of a job's log from the start of the last attempt on; empty without a log."""
    try:
        with log.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(start)
            log_end = file.read()
    except OSError:
        return ""
    return log_end[log_end.rfind(PROLOG_MARK.encode()) + 1 :].decode(errors="replace")


def _read_restart_count() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def log(line: str) -> None:
    """Print a line with PREFIX to stderr, the job's log."""
    print_to_stderr(PREFIX + line)


if __name__ == "__main__":
    sys.exit(main())
