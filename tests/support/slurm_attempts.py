"""Attempts at a run under SLURM: prolog, epilog, and what a run leaves for them."""

import json
import time
from dataclasses import replace
from pathlib import Path

from megatfm.launchers.attempts import Attempt, AttemptLog
from megatfm.launchers.prolog_epilog import main

RUNNING = "JobId=7 JobState=RUNNING Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00 Partition=main NumNodes=2\n"


def run_prolog(run: Path, *, least: int = 1, limit: int = 3) -> int:
    """Begin an attempt of job 7; returns the exit code."""
    words = ["--min-nodes", str(least), "--processes-per-node", "1"]
    return main(["prolog", *shared_arguments(run, limit), *words])


def run_epilog(run: Path, code: int, *words: str, limit: int = 3) -> int:
    """End an attempt of job 7 with an exit code; returns the exit code of the epilog."""
    requeue = [] if "--no-requeue" in words else ["--requeue"]
    return main(["epilog", *shared_arguments(run, limit), "--code", str(code), *requeue, *words])


def shared_arguments(run: Path, limit: int) -> list[str]:
    """Words that prolog and epilog have in common."""
    files = ["--log", str(run / "logs" / "slurm-7.log"), "--config", str(run / "slurm" / "config.toml")]
    return ["--run", str(run), *files, "--max-restarts", str(limit)]


def write_chain(run: Path, *jobs: int) -> None:
    """Write launch.json of a chain of these jobs."""
    (run / "launch.json").write_text(json.dumps({"launcher": "slurm", "jobs": [str(job) for job in jobs]}))


def write_log(run: Path, text: str) -> None:
    """Write the job's log."""
    (run / "logs" / "slurm-7.log").write_text(text)


def write_event(run: Path, **facts: object) -> None:
    """Add a line to the run's events.jsonl."""
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **facts}) + "\n")


def finish_run(run: Path) -> None:
    """The run records that all of its steps are done."""
    write_event(run, event="finished", detail="step 100", step=100)


def write_failures(run: Path, count: int, host: str | None = None) -> None:
    """Record failed attempts, which a host is blamed for."""
    for _ in range(count):
        begun = AttemptLog(run).begin(Attempt(time.time(), "7", job="7"))
        AttemptLog(run).end(replace(begun, ended=time.time(), code=1, reason="it broke", failed_host=host))
