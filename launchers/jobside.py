"""What a job script asks before and after each attempt: may it start, on which nodes, and what comes after it.

`python -m launchers.jobside begin …` prints `NODES HEAD LIST` for srun, or nothing when there is nothing to do.
`python -m launchers.jobside end …` requeues the job, leaves the word to the next link of its chain, or stops. Both
say on stderr, the job's log, what they decided and why, and exit with the code that the job shall end with.
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
from dataclasses import replace
from pathlib import Path

from launchers import scheduler
from launchers.files import EVENTS, last_records, newest_step
from launchers.fit import misfit, most_nodes
from launchers.queue import jobs_of
from launchers.restarts import FINAL, Attempt, Restarts
from megatfm.config import load_config
from megatfm.errors import DONE, FAILED, NO_PROGRESS, REQUEUE, USAGE, MegatfmError

PREFIX = "megatfm job: "
BEGIN_MARK = f"{PREFIX}attempt"
# srun names the node and how its tasks ended; who was killed by a signal is no victim of another's failure.
_SRUN = re.compile(r"^srun: error: ([\w.-]+): tasks? (\d+)(?:[-,\d]*): (.+)$", re.MULTILINE)
_LOST_NODE = re.compile(r"^srun: error: Node failure on ([\w.-]+)", re.MULTILINE)
_SIGNALLED = re.compile(r"Segmentation fault|Bus error|Aborted|Illegal instruction|Killed|Floating point")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launchers.jobside", description=__doc__)
    actions = parser.add_subparsers(required=True, dest="action")
    for name in ("begin", "end"):
        action = actions.add_parser(name)
        action.add_argument("--run", type=Path, required=True)
        action.add_argument("--log", type=Path, required=True)
        action.add_argument("--max-restarts", type=int, required=True)
        if name == "begin":
            action.add_argument("--config", type=Path, required=True)
            action.add_argument("--min-nodes", type=int, required=True)
            action.add_argument("--processes-per-node", type=int, required=True)
        else:
            action.add_argument("--code", type=int, required=True)
            action.add_argument("--asked", default="", help="the signal that asked it to stop")
            action.add_argument("--requeue", action=argparse.BooleanOptionalAction, required=True)
    args = parser.parse_args(argv)
    try:
        return begin(args) if args.action == "begin" else end(args)
    except (MegatfmError, OSError) as error:
        say(f"error: {error}")
        return error.exit_code if isinstance(error, MegatfmError) else FAILED


def begin(args: argparse.Namespace) -> int:
    """Note the attempt; print the nodes to use, or nothing when the run is finished or must not go on."""
    config = load_config(args.config)
    nodes = scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"])
    restarts, now = Restarts(args.run), time.time()
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if newest_step(args.run) >= config.train.steps and _last_event(args.run) == "finished":
        say(f"the run is finished: all of its {config.train.steps} steps are done")
        return DONE
    job = os.environ["SLURM_JOB_ID"]
    attempt = Attempt(now, submission(args.run, job), job, restart, nodes)
    restarts.begin(attempt, *blame(args.log)[:2])
    number = sum(each.submission == attempt.submission for each in restarts.attempts)
    say(f"attempt {number}: job {job}, from step {newest_step(args.run)}, on {', '.join(nodes)}")
    if spent := restarts.spent(args.max_restarts):
        # Reached when SLURM itself requeued the job, so that nobody could say so before.
        return _give_up(args, restarts, spent)
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
        restarts.end(replace(restarts.attempts[-1], code=USAGE, ended=now, reason=why or "too few nodes"))
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
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # a job that is requeued is told to end while we still speak
    restarts = Restarts(args.run)
    attempt = replace(restarts.attempts[-1], ended=time.time(), code=args.code, asked=bool(args.asked))
    if args.code in FINAL:
        restarts.end(replace(attempt, asked=False, reason=FINAL[args.code]))
        say(f"the run ended with {args.code}: {FINAL[args.code]}")
        if args.code in (DONE, USAGE, NO_PROGRESS):
            _drop_links(args.run, attempt.job)
        return int(args.code)
    if args.asked or args.code == REQUEUE:
        attempt = replace(attempt, reason=f"stopped by {args.asked or 'a signal'}")
    else:
        host, rank, how = blame(args.log)
        attempt = replace(attempt, failed_host=host, failed_rank=rank, reason=how or f"exit code {args.code}")
    restarts.end(attempt)
    say(f"{attempt.reason}; the newest checkpoint is of step {restarts.attempts[-1].step}")
    if spent := restarts.spent(args.max_restarts):
        return _give_up(args, restarts, spent)
    _go_on(args, restarts)
    return REQUEUE if not attempt.failed else FAILED


def _go_on(args: argparse.Namespace, restarts: Restarts) -> None:
    """Requeue, or leave it to the next link; either way not on a node that failed twice."""
    job = restarts.attempts[-1].job
    found = scheduler.facts(job)
    state = found.get("JobState", "")
    out_of_time = (scheduler.seconds(found.get("RunTime", "")) or 0) >= (
        scheduler.seconds(found.get("TimeLimit", "")) or sys.maxsize
    )
    if state in ("PENDING", "CANCELLED") or (state == "COMPLETING" and not out_of_time):
        # Cancelled by somebody, or requeued already: by preemption, or by somebody. Both look the same here.
        say(f"job {job} is {state}: SLURM decides what becomes of it")
        return
    following = links_after(args.run, job)
    if args.requeue:
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
        left = scheduler.usable_nodes(found.get("Partition", "")) - set(hosts)
        needed = int(re.match(r"\d+", found.get("NumNodes", "1"))[0])  # type: ignore[index]
        if len(left) < needed:
            say(
                f"{', '.join(hosts)}: failed twice, but only {len(left)} other nodes are usable: not excluded"
            )
            return
        for job in jobs:
            scheduler.exclude(job, hosts)
        say(f"{', '.join(hosts)}: failed twice, so excluded from now on")
    except MegatfmError as error:
        say(f"could not exclude {', '.join(hosts)}: {error}")


def _give_up(args: argparse.Namespace, restarts: Restarts, why: str) -> int:
    say(f"no progress: {why}. Mend the cause, then launch again")
    last = restarts.attempts[-1]
    restarts.end(
        replace(last, ended=time.time(), code=NO_PROGRESS if last.code is None else last.code, reason=why)
    )
    _drop_links(args.run, last.job)
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


def blame(log: Path) -> tuple[str | None, int | None, str]:
    """Host, rank and manner of the first failure that the log tells since the attempt began, where it does."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, None, ""
    text = text[text.rfind(BEGIN_MARK) + 1 :]
    if lost := _LOST_NODE.search(text):
        return lost[1], None, f"node {lost[1]} failed"
    for line in reversed(text.splitlines()):
        if '"failed_host"' in line:  # a rank that saw another hang or die says so in one line of JSON
            with contextlib.suppress(ValueError, TypeError, KeyError):
                told = json.loads(line[line.index("{") :])
                return str(told["failed_host"]), int(told["failed_rank"]), str(told.get("reason", "failed"))
    ended = [match for match in _SRUN.finditer(text) if "exit code 0" not in match[3]]
    guilty = [match for match in ended if _SIGNALLED.search(match[3])]
    if not guilty and len({match[1] for match in ended}) > 1:
        return None, None, f"{ended[0][3].lower()} on several nodes"  # all ended: nobody can say who began
    first = next(iter(guilty or ended), None)
    if first is None:
        return None, None, ""
    return first[1], int(first[2]), f"rank {first[2]} on {first[1]}: {first[3].lower()}"


def _last_event(run: Path) -> str:
    records = last_records(run / EVENTS, 1)
    return str(records[-1].get("event", "")) if records else ""


def say(line: str) -> None:
    print(PREFIX + line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
