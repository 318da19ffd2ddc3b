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
from megatfm.errors import DONE, FAILED, NO_PROGRESS, REQUEUE, MegatfmError
from megatfm.launchers.beside import check_free, process
from megatfm.launchers.files import EVENTS, finished, last_records, launched, note_launch, number_of
from megatfm.launchers.job import UNKNOWN, Job, State
from megatfm.launchers.restarts import FINAL, UNFINISHED, Attempt, Restarts

WORDS = {"finished": "DONE", "stopped": "STOPPED"}
"""What a run's own last event means, for a process that is gone."""


class Foreground:
    """Runs a job under the eyes of this process, and starts it again after a failure if it may."""

    name: str

    def __init__(self, max_restarts: int = 0) -> None:
        self.max_restarts = max_restarts

    def run(self, job: Job, attempt: Callable[[], int]) -> int:
        """Run to the end, and again after failures; returns the last exit code, 76 when restarts gain nothing."""
        run = job.run_dir
        check_free(job)
        if job.kind == "evaluate":  # a note of it would take the place of the run's own
            return attempt()
        note = {"launcher": self.name, "kind": job.kind, "host": socket.gethostname()}
        try:
            run.mkdir(parents=True, exist_ok=True)
            note_launch(run, **note, pid=os.getpid(), started=psutil.Process().create_time())
            try:
                return self._again_and_again(job, attempt) if job.kind == "train" else attempt()
            finally:
                note_launch(run, **note)
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or run}: can't write the run directory: {error.strerror}"
            ) from error

    def _again_and_again(self, job: Job, attempt: Callable[[], int]) -> int:
        """Attempts until one ends for good, or they gain nothing."""
        assert isinstance(job.resolved, Config)
        run, steps = job.run_dir, job.resolved.train.steps
        me, restarts = f"{socket.gethostname()}:{os.getpid()}:{time.time()}", Restarts(run)
        while True:
            begun = restarts.begin(Attempt(time.time(), submission=me, job=me, nodes=[socket.gethostname()]))
            code = attempt()
            if code == REQUEUE and finished(run, steps):  # asked to stop after its last step
                code = DONE
            elif code == DONE and not finished(run, steps):
                code = FAILED
                print(f"megatfm: {UNFINISHED}", file=sys.stderr)
            reason = FINAL.get(code, "stopped by a signal" if code == REQUEUE else f"exit code {code}")
            ended = restarts.end(replace(begun, ended=time.time(), code=code, reason=reason))
            if code in FINAL or code == REQUEUE or not self.max_restarts:
                return code
            if spent := restarts.spent(me, self.max_restarts):
                print(f"megatfm: no progress: {spent}", file=sys.stderr)
                restarts.end(replace(ended, code=NO_PROGRESS, reason=spent))
                return NO_PROGRESS
            print("megatfm: starting again from the newest checkpoint", file=sys.stderr)

    def status(self, run: Path) -> State:
        """RUNNING while the process that launched it lives; else how it ended."""
        note = launched(run)
        if process(run):
            return State("RUNNING", f"pid {note['pid']} on {note['host']}", number_of(note, "time"))
        if note.get("host") != socket.gethostname() and not _ended(run):
            return State(UNKNOWN, f"started on {note.get('host')}: ask there")
        return _ended(run) or State("FAILED", "its launcher is gone, and left no word")

    def logs(self, run: Path) -> list[Path]:
        """None: rank 0 writes to the terminal and to its own log alike."""
        return []


def _ended(run: Path) -> State | None:
    attempts = Restarts(run).attempts
    if attempts and (last := attempts[-1]).ended is not None:
        return State(last.word, last.reason, last.ended)
    events = last_records(run / EVENTS, 1)
    if events and (word := WORDS.get(str(events[0].get("event")))):
        return State(word, str(events[0].get("detail", "")), number_of(events[0], "time"))
    return None
