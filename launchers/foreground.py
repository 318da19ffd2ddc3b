"""What the launchers that stay in front of their ranks share: the note of who runs, restarts, status and cancel."""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from megatfm.config import Config
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, NO_PROGRESS, MegatfmError
from megatfm.launchers.beside import launcher_process, refuse_concurrent_launch
from megatfm.launchers.files import (
    EVENTS,
    finished,
    number_of,
    read_launch_record,
    tail_jsonl,
    write_launch_record,
)
from megatfm.launchers.job import UNKNOWN, Job, JobState
from megatfm.launchers.restarts import FINAL_EXIT_REASONS, UNFINISHED, Attempt, AttemptLog

WORDS = {"finished": "DONE", "stopped": "STOPPED"}
"""What a run's own last event means, for a process that is gone."""


class ForegroundLauncher:
    """Runs a job under the eyes of this process, and starts it again after a failure if it may."""

    name: str

    def __init__(self, max_restarts: int = 0) -> None:
        self.max_restarts = max_restarts

    def run(self, job: Job, attempt: Callable[[], int]) -> int:
        """Run to the end, and again after failures; returns the last exit code, 76 when restarts gain nothing."""
        run = job.run_dir
        refuse_concurrent_launch(job)
        if job.kind == "evaluate":  # a note of it would take the place of the run's own
            return attempt()
        launch_record = {"launcher": self.name, "kind": job.kind, "host": socket.gethostname()}
        try:
            run.mkdir(parents=True, exist_ok=True)
            write_launch_record(run, **launch_record, pid=os.getpid(), started=psutil.Process().create_time())
            try:
                return self._run_with_restarts(job, attempt) if job.kind == "train" else attempt()
            finally:
                write_launch_record(run, **launch_record)
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or run}: can't write the run directory: {error.strerror}"
            ) from error

    def _run_with_restarts(self, job: Job, attempt: Callable[[], int]) -> int:
        """Attempts until one ends for good, or they gain nothing."""
        assert isinstance(job.config, Config)
        run, steps = job.run_dir, job.config.train.steps
        me, restarts = f"{socket.gethostname()}:{os.getpid()}:{time.time()}", AttemptLog(run)
        while True:
            begun = restarts.begin(Attempt(time.time(), submission=me, job=me, nodes=[socket.gethostname()]))
            code = attempt()
            if code == EXIT_REQUEUE and finished(run, steps):  # asked to stop after its last step
                code = EXIT_OK
            elif code == EXIT_OK and not finished(run, steps):
                code = EXIT_FAILED
                print(f"megatfm: {UNFINISHED}", file=sys.stderr)
            reason = FINAL_EXIT_REASONS.get(
                code, "stopped by a signal" if code == EXIT_REQUEUE else f"exit code {code}"
            )
            ended = restarts.end(replace(begun, ended=time.time(), code=code, reason=reason))
            if code in FINAL_EXIT_REASONS or code == EXIT_REQUEUE or not self.max_restarts:
                return code
            if spent := restarts.restart_limit_reason(me, self.max_restarts):
                print(f"megatfm: no progress: {spent}", file=sys.stderr)
                restarts.end(replace(ended, code=NO_PROGRESS, reason=spent))
                return NO_PROGRESS
            print("megatfm: starting again from the newest checkpoint", file=sys.stderr)

    def status(self, run: Path) -> JobState:
        """RUNNING while the process that launched it lives; else how it ended."""
        launch_record = read_launch_record(run)
        if launcher_process(run):
            return JobState(
                "RUNNING",
                f"pid {launch_record['pid']} on {launch_record['host']}",
                number_of(launch_record, "time"),
            )
        if launch_record.get("host") != socket.gethostname() and not _ended(run):
            return JobState(UNKNOWN, f"started on {launch_record.get('host')}: ask there")
        return _ended(run) or JobState("FAILED", "its launcher is gone, and left no word")

    def logs(self, run: Path) -> list[Path]:
        """None: rank 0 writes to the terminal and to its own log alike."""
        return []


def _ended(run: Path) -> JobState | None:
    attempts = AttemptLog(run).attempts
    if attempts and (last := attempts[-1]).ended is not None:
        return JobState(last.state_name, last.reason, last.ended)
    events = tail_jsonl(run / EVENTS, 1)
    if events and (word := WORDS.get(str(events[0].get("event")))):
        return JobState(word, str(events[0].get("detail", "")), number_of(events[0], "time"))
    return None
