"""Prolog and epilog of the batch script: choose the nodes of an attempt; requeue the job or stop after it.

`python -m megatfm.launchers.prolog_epilog prolog …` prints `NODES HEAD LIST` for srun, or nothing where nothing is left
to do. `… epilog …` requeues the job, leaves the run to the next job of its chain, or stops. `… requeue …` requeues a
task of a preparation that was stopped. All write to stderr, the job's log, what they decided and why, and exit with the
code that the job shall end with.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from megatfm.config import load_config
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, NO_PROGRESS, MegatfmError
from megatfm.files import atomic_write
from megatfm.launchers import scheduler
from megatfm.launchers.record import (
    EVENTS,
    FINAL_EXIT_REASONS,
    MAX_STOPS_WITHOUT_PROGRESS,
    RESTARTS,
    UNFINISHED,
    Attempt,
    AttemptLog,
    finished,
    latest_checkpoint_step,
    number_of,
    read_json,
    tail_jsonl,
    texts_of,
)
from megatfm.launchers.run_jobs import job_ids, job_state
from megatfm.launchers.status import prep_progress
from megatfm.launchers.validation import layout_error, max_fitting_nodes

PREFIX = "megatfm job: "
LOG_BYTES = 2**24
"""Bytes at a log's end that are searched for SLURM's messages, which are few and come last."""
UNSEEN_STOPS = 100
"""Stops of a task whose parts can't be counted, as they lie in the scratch folder of a preparation to a URL."""
PROLOG_MARK = f"{PREFIX}attempt"
# srun names the node and how its tasks ended; a rank killed by a signal is no victim of another's failure.
_SRUN = re.compile(r"^srun: error: ([\w.-]+): tasks? (\d+)(?:[-,\d]*): (.+)$", re.MULTILINE)
_NOT_LAUNCHED = re.compile(r"^srun: error: Task launch for \S+ failed on node ([\w.-]+): (.+)$", re.MULTILINE)
_LOST_NODE = re.compile(r"^srun: error: Node failure on ([\w.-]+)", re.MULTILINE)
_ENDED = re.compile(
    r"^slurmstepd.*\*\*\* JOB \d+ ON \S+ CANCELLED AT (\d{4}-\S+)(?: DUE TO ([A-Z ]+))?", re.MULTILINE
)
_SIGNALLED = re.compile(r"Segmentation fault|Bus error|Aborted|Illegal instruction|Killed|Floating point")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the three; returns the exit code."""
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
            action.add_argument("--asked", default="", help="the signal that asked it to stop")
            action.add_argument("--requeue", action=argparse.BooleanOptionalAction, required=True)
    args = parser.parse_args(argv)
    try:
        return {"prolog": prolog, "epilog": epilog, "requeue": requeue_prep_task}[args.action](args)
    except (MegatfmError, OSError) as error:
        log(f"error: {error}")
        return error.exit_code if isinstance(error, MegatfmError) else EXIT_FAILED


def prolog(args: argparse.Namespace) -> int:
    """Note the attempt; print the nodes to use, or nothing when the run is finished or must not go on."""
    config = load_config(args.config)
    nodes = scheduler.expand_nodelist(os.environ["SLURM_JOB_NODELIST"])
    restarts, now = AttemptLog(args.run), time.time()
    if latest_checkpoint_step(args.run) >= config.train.steps and finished(args.run, config.train.steps):
        log(f"the run is finished: all of its {config.train.steps} steps are done")
        return EXIT_OK
    job = os.environ["SLURM_JOB_ID"]
    group = submission_id(args.run, job)
    if unfinished := restarts.unfinished_attempt(group):
        cause = find_failure_cause(args.log, args.run, unfinished.time)
        reason = cause.reason or "lost with its job script"
        restarts.end(
            replace(
                unfinished,
                ended=now,
                asked=cause.ended_by_slurm,
                reason=reason,
                failed_host=cause.host,
                failed_rank=cause.rank,
            )
        )
    attempt = restarts.begin(Attempt(now, group, job, _restart(), nodes))
    number = sum(earlier.submission == group for earlier in restarts.attempts)
    log(f"attempt {number}: job {job}, from step {attempt.first_step}, on {', '.join(nodes)}")
    if spent := restarts.restart_limit_reason(group, args.max_restarts):
        # Reached when SLURM itself requeued the job, without a record.
        return _stop_without_progress(args, restarts, attempt, spent)
    bad = set(restarts.faulty_hosts(now)) & set(nodes)
    usable = [node for node in nodes if node not in bad]
    if (
        bad
        and max_fitting_nodes(config, range(args.min_nodes, len(usable) + 1), args.processes_per_node) is None
    ):
        log(f"{', '.join(sorted(bad))}: failed before but used again: too few other nodes are left")
        usable = nodes
    elif bad:
        log(f"{', '.join(sorted(bad))}: left out, since the run failed there before")
    count = max_fitting_nodes(config, range(args.min_nodes, len(usable) + 1), args.processes_per_node)
    if count is None:
        misfit = layout_error(config, len(usable) * args.processes_per_node)
        restarts.end(replace(attempt, code=EXIT_USAGE, ended=now, reason=misfit or "too few nodes"))
        log(f"error: the run fits on none of {args.min_nodes} to {len(usable)} nodes: on the last, {misfit}")
        return EXIT_USAGE
    if count < len(nodes):
        log(
            f"trains on {count} of {len(nodes)} nodes: "
            f"{layout_error(config, len(usable) * args.processes_per_node) or ''}"
        )
    print(count, usable[0], ",".join(usable[:count]))
    return EXIT_OK


def epilog(args: argparse.Namespace) -> int:
    """Note how the attempt ended, and see to the next one."""
    restarts, job = AttemptLog(args.run), os.environ["SLURM_JOB_ID"]
    started_attempt = restarts.attempt_of_job(job, _restart())
    if started_attempt is None:
        raise MegatfmError(f"{args.run / RESTARTS}: nothing is noted of job {job}: was the file removed?")
    code = args.code
    is_requested = args.asked or (
        "USR1" if code == 128 + signal.SIGUSR1 else ""
    )  # of which a rank died while it started
    if code in (EXIT_OK, EXIT_REQUEUE) or is_requested:  # asked to stop, it may have done its last step
        has_finished = finished(args.run, load_config(args.config).train.steps)
        code = EXIT_OK if has_finished else code or EXIT_FAILED
    attempt = replace(started_attempt, ended=time.time(), code=code, asked=bool(is_requested))
    if code in FINAL_EXIT_REASONS:
        restarts.end(replace(attempt, asked=False, reason=FINAL_EXIT_REASONS[code]))
        log(f"the run ended with {code}: {FINAL_EXIT_REASONS[code]}")
        if code in (EXIT_OK, EXIT_USAGE, NO_PROGRESS):
            _cancel_later_chain_jobs(args.run, job)
        return int(code)
    if is_requested or code == EXIT_REQUEUE:
        attempt = replace(attempt, reason=f"stopped by {is_requested or 'a signal'}")
    else:
        following = restarts.next_attempt(started_attempt)
        cause = find_failure_cause(
            args.log, args.run, started_attempt.time, following.time if following else None
        )
        reason = cause.reason or (f"exit code {code}" if args.code else UNFINISHED)
        attempt = replace(attempt, failed_host=cause.host, failed_rank=cause.rank, reason=reason)
    attempt = restarts.end(attempt)
    log(f"{attempt.reason}; the newest checkpoint is of step {attempt.step}")
    if spent := restarts.restart_limit_reason(attempt.submission, args.max_restarts):
        return _stop_without_progress(args, restarts, attempt, spent)
    _requeue_or_chain(args, restarts, attempt)
    return EXIT_FAILED if attempt.is_failure else EXIT_REQUEUE


def requeue_prep_task(args: argparse.Namespace) -> int:
    """Requeue a task of a preparation that was stopped, unless stop after stop no part was finished by any task."""
    job, task = os.environ["SLURM_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    note, submitted = args.run / "slurm" / f"stops.{task}.json", os.environ["SLURM_ARRAY_JOB_ID"]
    previous, work = read_json(note, {}), prep_progress(args.run)
    is_same_job = isinstance(previous, dict) and (
        previous.get("job"),
        previous.get("work"),
    ) == (submitted, work)
    stops = 1 + (previous["stops"] if is_same_job and isinstance(previous.get("stops"), int) else 0)
    atomic_write(note, json.dumps({"job": submitted, "work": work, "stops": stops}) + "\n")
    if stops > (MAX_STOPS_WITHOUT_PROGRESS if work else UNSEEN_STOPS):
        log(
            f"no progress: task {task} was stopped {stops} times in a row, and no part was finished: give more --time"
        )
        return NO_PROGRESS
    if job_state(job).name == "RUNNING":  # else it was cancelled
        scheduler.requeue(job)
        log(f"task {task} is requeued: it goes on when its turn comes")
    return EXIT_REQUEUE


def _requeue_or_chain(args: argparse.Namespace, restarts: AttemptLog, attempt: Attempt) -> None:
    """Requeue, or leave it to the next link; either way not on a node that failed twice."""
    job = attempt.job
    record = scheduler.show_job(job)
    state = record.get("JobState", "")
    out_of_time = (scheduler.parse_time(record.get("RunTime", "")) or 0) >= (
        scheduler.parse_time(record.get("TimeLimit", "")) or sys.maxsize
    )
    requeued = int(record.get("Restarts", "0")) > attempt.restart
    if not requeued and (state == "CANCELLED" or (state == "COMPLETING" and not out_of_time)):
        log(f"job {job} was cancelled, so nothing goes on")
        return
    following = later_chain_jobs(args.run, job)
    if requeued:
        log(f"SLURM has requeued job {job}")
        following = [job]
    elif args.requeue:
        scheduler.requeue(job)
        log(f"job {job} is requeued: it goes on from its checkpoint when its turn comes")
        following = [job]
    elif following:
        log(f"the next link of the chain, job {following[0]}, goes on from here")
    else:
        log("this site requeues nothing, and the chain has no further link: start the same command again")
    if (hosts := restarts.faulty_hosts(time.time())) and following:
        _exclude(following, hosts, record)


def _exclude(jobs: Sequence[str], hosts: Sequence[str], record: dict[str, str]) -> None:
    """Keep jobs off hosts, if enough others are left for them ever to start."""
    try:
        site_value = record.get(
            "ExcNodeList", "(null)"
        )  # what the site leaves out, which an update would forget
        excluded = {
            *hosts,
            *(scheduler.expand_nodelist(site_value) if site_value != "(null)" else ()),
        }
        free_nodes = scheduler.usable_nodes(record.get("Partition", "")) - excluded
        needed = int(re.match(r"\d+", record.get("NumNodes", "1"))[0])  # type: ignore[index]
        if len(free_nodes) < needed:
            log(
                f"{', '.join(hosts)}: failed twice, but only {len(free_nodes)} other nodes are usable: not excluded"
            )
            return
        for job in jobs:
            scheduler.set_excluded_nodes(job, sorted(excluded))
        log(f"{', '.join(hosts)}: failed twice, so excluded from now on")
    except MegatfmError as error:
        log(f"could not exclude {', '.join(hosts)}: {error}")


def _stop_without_progress(
    args: argparse.Namespace, restarts: AttemptLog, attempt: Attempt, reason: str
) -> int:
    log(f"no progress: {reason}. Mend the cause, then launch again")
    restarts.end(replace(attempt, ended=time.time(), code=NO_PROGRESS, reason=reason))
    _cancel_later_chain_jobs(args.run, attempt.job)
    return NO_PROGRESS


def submission_id(run: Path, job: str) -> str:
    """Job under which restarts are counted: the first of the chain, or itself."""
    jobs = job_ids(run)
    return jobs[0] if job in jobs else job


def later_chain_jobs(run: Path, job: str) -> list[str]:
    """The jobs of a chain that were submitted after this one."""
    jobs = job_ids(run)
    return jobs[jobs.index(job) + 1 :] if job in jobs else []


def _cancel_later_chain_jobs(run: Path, job: str) -> None:
    if following := later_chain_jobs(run, job):
        with contextlib.suppress(MegatfmError):  # gone already
            scheduler.cancel(following)
        log(f"took the rest of the chain out of the queue: {', '.join(following)}")


@dataclass(frozen=True)
class FailureCause:
    """Cause of an attempt's end: host, rank and reason of the first failure, and whether SLURM itself ended it."""

    host: str | None = None
    rank: int | None = None
    reason: str = ""
    ended_by_slurm: bool = False


def find_failure_cause(
    log: Path, run: Path, started_at: float, next_started_at: float | None = None
) -> FailureCause:
    """Return how the attempt that began at `started_at` ended: by the run's events, else by srun's lines in the log.

    next_started_at: when the next attempt began, whose events are none of this one's.
    """
    text = _since_mark(log)
    cut, until = "", next_started_at or sys.float_info.max
    if ended := _ENDED.search(text):  # what SLURM then kills has done nothing wrong
        cut, until = (
            (ended[2] or "cancelled").strip(),
            min(until, datetime.fromisoformat(ended[1]).timestamp()),
        )
        text = text[: ended.start()]
    for event in reversed(tail_jsonl(run / EVENTS, 8)):
        if event.get("event") == "failed" and started_at <= (number_of(event, "time") or 0) < until:
            hosts, ranks = texts_of(event, "hosts"), texts_of(event, "ranks")
            is_single_rank = len(set(hosts)) == 1 and ranks and ranks[0].isdecimal()
            host, rank = (hosts[0], int(ranks[0])) if is_single_rank else (None, None)
            return FailureCause(host, rank, str(event.get("detail", "failed")))
    if lost_node := _LOST_NODE.search(text):
        return FailureCause(lost_node[1], None, f"node {lost_node[1]} failed")
    if reason_of_node := {match[1]: match[2] for match in _NOT_LAUNCHED.finditer(text)}:
        # srun then kills the tasks that did start, on nodes that are in order.
        reasons = "; ".join(
            f"node {node} could not start its tasks: {reason}" for node, reason in reason_of_node.items()
        )
        return FailureCause(next(iter(reason_of_node)) if len(reason_of_node) == 1 else None, None, reasons)
    tasks = list(_SRUN.finditer(text))
    guilty = [match for match in tasks if _SIGNALLED.search(match[3])]
    if not guilty and len({match[1] for match in tasks}) > 1:
        return FailureCause(reason=f"{tasks[0][3]} on several nodes")  # the first failure is unknown
    if first := next(iter(guilty or tasks), None):
        return FailureCause(first[1], int(first[2]), f"rank {first[2]} on {first[1]}: {first[3]}")
    return (
        FailureCause(reason=f"ended by SLURM: {cut.lower()}", ended_by_slurm=cut != "NODE FAILURE")
        if cut
        else FailureCause()
    )


def _since_mark(log: Path) -> str:
    """Text of a job's log since the last attempt began, its end at most; empty without a log."""
    try:
        with log.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(start)
            data = file.read()
    except OSError:
        return ""
    return data[data.rfind(PROLOG_MARK.encode()) + 1 :].decode(errors="replace")


def _restart() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def log(line: str) -> None:
    """Print a line for the job's log, marked as the launcher's, at once: to stderr."""
    print(PREFIX + line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
