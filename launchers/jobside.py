"""What a job script asks before and after each attempt: may it start, on which nodes, and what comes after it.

`python -m megatfm.launchers.jobside begin …` prints `NODES HEAD LIST` for srun, or nothing when there is nothing to do;
`… end …` requeues the job, leaves the word to the next link of its chain, or stops. Both say on stderr, the job's log,
what they decided and why, and exit with the code that the job shall end with. `… again …` does so for a task of a
preparation that was stopped.
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

from megatfm.atomic import write_whole
from megatfm.config import load_config
from megatfm.errors import DONE, FAILED, NO_PROGRESS, REQUEUE, USAGE, MegatfmError
from megatfm.launchers import scheduler
from megatfm.launchers.files import (
    EVENTS,
    finished,
    last_records,
    newest_step,
    number_of,
    read_json,
    texts_of,
)
from megatfm.launchers.fit import misfit, most_nodes
from megatfm.launchers.preparation import work_done
from megatfm.launchers.queue import job_state, jobs_of
from megatfm.launchers.restarts import FINAL, FRUITLESS_STOPS, RESTARTS, UNFINISHED, Attempt, Restarts

PREFIX = "megatfm job: "
LOG_BYTES = 2**24
"""How much of a log's end is searched for what SLURM said: it says little, and that at the end."""
UNSEEN_STOPS = 100
"""Stops of a task whose parts can't be counted, as they lie in the scratch folder of a preparation to a URL."""
BEGIN_MARK = f"{PREFIX}attempt"
# srun names the node and how its tasks ended; who was killed by a signal is no victim of another's failure.
_SRUN = re.compile(r"^srun: error: ([\w.-]+): tasks? (\d+)(?:[-,\d]*): (.+)$", re.MULTILINE)
_NOT_LAUNCHED = re.compile(r"^srun: error: Task launch for \S+ failed on node ([\w.-]+): (.+)$", re.MULTILINE)
_LOST_NODE = re.compile(r"^srun: error: Node failure on ([\w.-]+)", re.MULTILINE)
_ENDED = re.compile(
    r"^slurmstepd.*\*\*\* JOB \d+ ON \S+ CANCELLED AT (\d{4}-\S+)(?: DUE TO ([A-Z ]+))?", re.MULTILINE
)
_SIGNALLED = re.compile(r"Segmentation fault|Bus error|Aborted|Illegal instruction|Killed|Floating point")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megatfm.launchers.jobside", description=__doc__)
    actions = parser.add_subparsers(required=True, dest="action")
    actions.add_parser("again").add_argument("--run", type=Path, required=True)
    for name in ("begin", "end"):
        action = actions.add_parser(name)
        action.add_argument("--run", type=Path, required=True)
        action.add_argument("--log", type=Path, required=True)
        action.add_argument("--config", type=Path, required=True)
        action.add_argument("--max-restarts", type=int, required=True)
        if name == "begin":
            action.add_argument("--min-nodes", type=int, required=True)
            action.add_argument("--processes-per-node", type=int, required=True)
        else:
            action.add_argument("--code", type=int, required=True)
            action.add_argument("--asked", default="", help="the signal that asked it to stop")
            action.add_argument("--requeue", action=argparse.BooleanOptionalAction, required=True)
    args = parser.parse_args(argv)
    try:
        return {"begin": begin, "end": end, "again": again}[args.action](args)
    except (MegatfmError, OSError) as error:
        say(f"error: {error}")
        return error.exit_code if isinstance(error, MegatfmError) else FAILED


def begin(args: argparse.Namespace) -> int:
    """Note the attempt; print the nodes to use, or nothing when the run is finished or must not go on."""
    config = load_config(args.config)
    nodes = scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"])
    restarts, now = Restarts(args.run), time.time()
    if newest_step(args.run) >= config.train.steps and finished(args.run, config.train.steps):
        say(f"the run is finished: all of its {config.train.steps} steps are done")
        return DONE
    job = os.environ["SLURM_JOB_ID"]
    group = submission(args.run, job)
    if before := restarts.open(group):
        lost = blame(args.log, args.run, before.time)
        reason = lost.how or "lost with its job script"
        restarts.end(
            replace(
                before,
                ended=now,
                asked=lost.by_slurm,
                reason=reason,
                failed_host=lost.host,
                failed_rank=lost.rank,
            )
        )
    attempt = restarts.begin(Attempt(now, group, job, _restart(), nodes))
    number = sum(each.submission == group for each in restarts.attempts)
    say(f"attempt {number}: job {job}, from step {attempt.first_step}, on {', '.join(nodes)}")
    if spent := restarts.spent(group, args.max_restarts):
        # Reached when SLURM itself requeued the job, so that nobody could say so before.
        return _give_up(args, restarts, attempt, spent)
    bad = set(restarts.offenders(now)) & set(nodes)
    usable = [node for node in nodes if node not in bad]
    if bad and most_nodes(config, range(args.min_nodes, len(usable) + 1), args.processes_per_node) is None:
        say(f"{', '.join(sorted(bad))}: failed before, but there are too few other nodes to do without")
        usable = nodes
    elif bad:
        say(f"{', '.join(sorted(bad))}: left out, since the run failed there before")
    count = most_nodes(config, range(args.min_nodes, len(usable) + 1), args.processes_per_node)
    if count is None:
        why = misfit(config, len(usable) * args.processes_per_node)
        restarts.end(replace(attempt, code=USAGE, ended=now, reason=why or "too few nodes"))
        say(f"error: the run fits on none of {args.min_nodes} to {len(usable)} nodes: on the last, {why}")
        return USAGE
    if count < len(nodes):
        say(
            f"trains on {count} of {len(nodes)} nodes: {misfit(config, len(usable) * args.processes_per_node) or ''}"
        )
    print(count, usable[0], ",".join(usable[:count]))
    return DONE


def end(args: argparse.Namespace) -> int:
    """Note how the attempt ended, and see to the next one."""
    restarts, job = Restarts(args.run), os.environ["SLURM_JOB_ID"]
    begun = restarts.of_job(job, _restart())
    if begun is None:
        raise MegatfmError(f"{args.run / RESTARTS}: nothing is noted of job {job}: was the file removed?")
    code = args.code
    asked = args.asked or (
        "USR1" if code == 128 + signal.SIGUSR1 else ""
    )  # of which a rank died while it started
    if code in (DONE, REQUEUE) or asked:  # asked to stop, it may have done its last step
        has_finished = finished(args.run, load_config(args.config).train.steps)
        code = DONE if has_finished else code or FAILED
    attempt = replace(begun, ended=time.time(), code=code, asked=bool(asked))
    if code in FINAL:
        restarts.end(replace(attempt, asked=False, reason=FINAL[code]))
        say(f"the run ended with {code}: {FINAL[code]}")
        if code in (DONE, USAGE, NO_PROGRESS):
            _drop_links(args.run, job)
        return int(code)
    if asked or code == REQUEUE:
        attempt = replace(attempt, reason=f"stopped by {asked or 'a signal'}")
    else:
        following = restarts.after(begun)
        found = blame(args.log, args.run, begun.time, following.time if following else None)
        reason = found.how or (f"exit code {code}" if args.code else UNFINISHED)
        attempt = replace(attempt, failed_host=found.host, failed_rank=found.rank, reason=reason)
    attempt = restarts.end(attempt)
    say(f"{attempt.reason}; the newest checkpoint is of step {attempt.step}")
    if spent := restarts.spent(attempt.submission, args.max_restarts):
        return _give_up(args, restarts, attempt, spent)
    _go_on(args, restarts, attempt)
    return FAILED if attempt.failed else REQUEUE


def again(args: argparse.Namespace) -> int:
    """Requeue a task of a preparation that was stopped, unless stop after stop no part was finished by any task."""
    job, task = os.environ["SLURM_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    note, submitted = args.run / "slurm" / f"stops.{task}.json", os.environ["SLURM_ARRAY_JOB_ID"]
    before, work = read_json(note, {}), work_done(args.run)
    same = isinstance(before, dict) and (before.get("job"), before.get("work")) == (submitted, work)
    stops = 1 + (before["stops"] if same and isinstance(before.get("stops"), int) else 0)
    write_whole(note, json.dumps({"job": submitted, "work": work, "stops": stops}) + "\n")
    if stops > (FRUITLESS_STOPS if work else UNSEEN_STOPS):
        say(
            f"no progress: task {task} was stopped {stops} times in a row, and no part was finished: give more --time"
        )
        return NO_PROGRESS
    if job_state(job).word == "RUNNING":  # else it was cancelled
        scheduler.requeue(job)
        say(f"task {task} is requeued: it goes on when its turn comes")
    return REQUEUE


def _go_on(args: argparse.Namespace, restarts: Restarts, attempt: Attempt) -> None:
    """Requeue, or leave it to the next link; either way not on a node that failed twice."""
    job = attempt.job
    found = scheduler.facts(job)
    state = found.get("JobState", "")
    out_of_time = (scheduler.seconds(found.get("RunTime", "")) or 0) >= (
        scheduler.seconds(found.get("TimeLimit", "")) or sys.maxsize
    )
    requeued = int(found.get("Restarts", "0")) > attempt.restart
    if not requeued and (state == "CANCELLED" or (state == "COMPLETING" and not out_of_time)):
        say(f"job {job} was cancelled, so nothing goes on")
        return
    following = links_after(args.run, job)
    if requeued:
        say(f"SLURM has requeued job {job}")
        following = [job]
    elif args.requeue:
        scheduler.requeue(job)
        say(f"job {job} is requeued: it goes on from its checkpoint when its turn comes")
        following = [job]
    elif following:
        say(f"the next link of the chain, job {following[0]}, goes on from here")
    else:
        say("this site requeues nothing, and the chain has no further link: start the same command again")
    if (hosts := restarts.offenders(time.time())) and following:
        _exclude(following, hosts, found)


def _exclude(jobs: Sequence[str], hosts: Sequence[str], found: dict[str, str]) -> None:
    """Keep jobs off hosts, if enough others are left for them ever to start."""
    try:
        before = found.get("ExcNodeList", "(null)")  # what the site leaves out, which an update would forget
        excluded = {*hosts, *(scheduler.hostnames(before) if before != "(null)" else ())}
        left = scheduler.usable_nodes(found.get("Partition", "")) - excluded
        needed = int(re.match(r"\d+", found.get("NumNodes", "1"))[0])  # type: ignore[index]
        if len(left) < needed:
            say(
                f"{', '.join(hosts)}: failed twice, but only {len(left)} other nodes are usable: not excluded"
            )
            return
        for job in jobs:
            scheduler.exclude(job, sorted(excluded))
        say(f"{', '.join(hosts)}: failed twice, so excluded from now on")
    except MegatfmError as error:
        say(f"could not exclude {', '.join(hosts)}: {error}")


def _give_up(args: argparse.Namespace, restarts: Restarts, attempt: Attempt, why: str) -> int:
    say(f"no progress: {why}. Mend the cause, then launch again")
    restarts.end(replace(attempt, ended=time.time(), code=NO_PROGRESS, reason=why))
    _drop_links(args.run, attempt.job)
    return NO_PROGRESS


def submission(run: Path, job: str) -> str:
    """What a job's restarts are counted over: the first link of its chain, or itself."""
    jobs = jobs_of(run)
    return jobs[0] if job in jobs else job


def links_after(run: Path, job: str) -> list[str]:
    """The jobs of a chain that were submitted after this one."""
    jobs = jobs_of(run)
    return jobs[jobs.index(job) + 1 :] if job in jobs else []


def _drop_links(run: Path, job: str) -> None:
    if following := links_after(run, job):
        with contextlib.suppress(MegatfmError):  # gone already
            scheduler.cancel(following)
        say(f"took the rest of the chain out of the queue: {', '.join(following)}")


@dataclass(frozen=True)
class Blame:
    """What a log tells of an attempt's end: where it failed first, how, and whether SLURM itself ended it."""

    host: str | None = None
    rank: int | None = None
    how: str = ""
    by_slurm: bool = False


def blame(log: Path, run: Path, since: float, before: float | None = None) -> Blame:
    """How the attempt that began at `since` ended, by the run's own events, else by what srun said in the log.

    before: when the next attempt began, whose events are none of this one's.
    """
    text = _since_mark(log)
    cut, until = "", before or sys.float_info.max
    if ended := _ENDED.search(text):  # what SLURM then kills has done nothing wrong
        cut, until = (
            (ended[2] or "cancelled").strip(),
            min(until, datetime.fromisoformat(ended[1]).timestamp()),
        )
        text = text[: ended.start()]
    for event in reversed(last_records(run / EVENTS, 8)):
        if event.get("event") == "failed" and since <= (number_of(event, "time") or 0) < until:
            hosts, ranks = texts_of(event, "hosts"), texts_of(event, "ranks")
            known = len(set(hosts)) == 1 and ranks and ranks[0].isdecimal()
            host, rank = (hosts[0], int(ranks[0])) if known else (None, None)
            return Blame(host, rank, str(event.get("detail", "failed")))
    if lost := _LOST_NODE.search(text):
        return Blame(lost[1], None, f"node {lost[1]} failed")
    if refused := {match[1]: match[2] for match in _NOT_LAUNCHED.finditer(text)}:
        # srun then kills the tasks that did start, on nodes that are in order.
        how = "; ".join(f"node {node} could not start its tasks: {why}" for node, why in refused.items())
        return Blame(next(iter(refused)) if len(refused) == 1 else None, None, how)
    tasks = list(_SRUN.finditer(text))
    guilty = [match for match in tasks if _SIGNALLED.search(match[3])]
    if not guilty and len({match[1] for match in tasks}) > 1:
        return Blame(how=f"{tasks[0][3]} on several nodes")  # nobody can say who began
    if first := next(iter(guilty or tasks), None):
        return Blame(first[1], int(first[2]), f"rank {first[2]} on {first[1]}: {first[3]}")
    return Blame(how=f"ended by SLURM: {cut.lower()}", by_slurm=cut != "NODE FAILURE") if cut else Blame()


def _since_mark(log: Path) -> str:
    """What a job's log says since the last attempt began, its end at most; nothing where there is no such file."""
    try:
        with log.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(start)
            data = file.read()
    except OSError:
        return ""
    return data[data.rfind(BEGIN_MARK.encode()) + 1 :].decode(errors="replace")


def _restart() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def say(line: str) -> None:
    """Print a line for the job's log, marked as the launcher's, at once: to stderr."""
    print(PREFIX + line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
