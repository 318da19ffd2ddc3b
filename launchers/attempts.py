"""The attempts at a run, in restarts.json: their record, and whether another restart makes sense.

Only launchers write the file: the job script's prolog and epilog, or `megatfm launch`.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS
from megatfm.files import atomic_write, lock_path, name_disk_errors
from megatfm.launchers.record import find_latest_checkpoint_step
from megatfm.terminal import print_to_stderr

RESTARTS = "restarts.json"
FINAL_EXIT_REASONS = {
    EXIT_OK: "done",
    EXIT_USAGE: "the command line or the config is invalid",
    NO_PROGRESS: "restarts make no progress: no new checkpoint",
    LOCKED: "another job trains this run",
}
"""Exit codes after which a restart would end the same way → reason."""

UNFINISHED = "exit code 0, but events.jsonl has no `finished` event"

MAX_STOPS_WITHOUT_PROGRESS = 10
"""Largest number of stops by a signal in a row without a new checkpoint. More have a systematic cause, for example a
time limit shorter than the start."""
LOCK_SECONDS = 10.0
"""Longest wait for another process that writes restarts.json: it needs milliseconds, unless it is stopped."""
MAX_HOST_FAILURES = 2
HOST_FAILURE_WINDOW_SECONDS = 7 * 86400.0  # by then the site has repaired or drained a broken node


@dataclass(frozen=True)
class Attempt:
    """One start of a run. `code` is None while it runs, and if its job script was killed before the epilog."""

    time: float
    """Start in seconds since 1970."""
    submission: str
    """Id under which restarts are counted: the first job of the chain."""
    job: str = ""
    restart: int = 0
    nodes: list[str] = field(default_factory=list)
    first_step: int = 0
    """Step of the newest checkpoint when the attempt began."""
    step: int = 0
    """Step of the newest checkpoint when the attempt ended."""
    code: int | None = None
    asked: bool = False
    """Whether the attempt was told to stop: by the time limit, preemption or a person."""
    reason: str = ""
    failed_host: str | None = None
    failed_rank: int | None = None
    ended: float | None = None

    @property
    def key(self) -> tuple[str, float]:
        """Job and start, which no two attempts have in common."""
        return self.job, self.time

    @property
    def made_progress(self) -> bool:
        """Whether the attempt saved a checkpoint."""
        return self.step > self.first_step

    @property
    def is_failure(self) -> bool:
        """Whether the attempt ended with an error, without having been told to stop."""
        return self.ended is not None and self.code not in (EXIT_OK, EXIT_REQUEUE) and not self.asked

    @property
    def state_name(self) -> str:
        """State for `megatfm status`. An attempt that was told to stop is STOPPED, even if a signal killed it."""
        state_names = {EXIT_OK: "DONE", EXIT_REQUEUE: "STOPPED", NO_PROGRESS: "NO PROGRESS"}
        return state_names.get(EXIT_FAILED if self.code is None else self.code, "STOPPED" if self.asked else "FAILED")


class AttemptLog:
    """The attempts at a run, oldest first, as restarts.json stores them."""

    def __init__(self, run: Path) -> None:
        """Read restarts.json. Damaged entries are reported on stderr and ignored."""
        self.run = run
        self.attempts = self._read()
        if self._damaged:
            print_to_stderr(f"megatfm: {run / RESTARTS}: ignored, since damaged: {self._damaged}")

    def begin(self, attempt: Attempt) -> Attempt:
        """Record the start of an attempt; return the attempt with its first step filled in. Raises MegatfmError."""
        attempt = replace(attempt, first_step=find_latest_checkpoint_step(self.run))
        with name_disk_errors("write", self.run / RESTARTS, "make room, and launch again"):
            self._update(lambda attempts: [*attempts, attempt])
        return attempt

    def end(self, attempt: Attempt) -> Attempt:
        """Record the end of an attempt, and its start if that isn't recorded; return it with its last step filled in.

        If the file can't be written, as on a full disk, this object alone knows the end: a job has to end all the same.
        """
        ended = replace(attempt, step=find_latest_checkpoint_step(self.run))

        def change(attempts: Sequence[Attempt]) -> list[Attempt]:
            changed = [ended if stored.key == attempt.key else stored for stored in attempts]
            return changed if ended in changed else [*changed, ended]

        self._try_to_update(change)
        return ended

    def discard(self, attempt: Attempt) -> None:
        """Remove an attempt that was refused."""
        self._try_to_update(lambda attempts: [stored for stored in attempts if stored.key != attempt.key])

    def find_unfinished_attempt(self, submission: str) -> Attempt | None:
        """Return the last attempt of a submission if its end isn't recorded."""
        last = next((attempt for attempt in reversed(self.attempts) if attempt.submission == submission), None)
        return last if last and last.ended is None else None

    def find_attempt_of_job(self, job: str, restart: int) -> Attempt | None:
        """Return the attempt of one start of a job. Later attempts may have begun before it ends."""
        attempts = [attempt for attempt in self.attempts if (attempt.job, attempt.restart) == (job, restart)]
        return attempts[-1] if attempts else None

    def find_next_attempt(self, attempt: Attempt) -> Attempt | None:
        """Return the first attempt that began after this one."""
        return next((later for later in self.attempts if later.time > attempt.time), None)

    def explain_restart_limit(self, submission: str, max_restarts: int) -> str | None:
        """Return why a submission must not be restarted; None if it may be."""
        failures, stops = self.count_without_progress(submission)
        if failures > max_restarts:
            cause = f"{failures} attempts in a row failed" if failures > 1 else "it failed"
        elif stops > MAX_STOPS_WITHOUT_PROGRESS:
            cause = f"{stops} attempts in a row were stopped"
        else:
            return None
        reason = f"{cause} without a new checkpoint after step {find_latest_checkpoint_step(self.run)}"
        if failures <= max_restarts:
            return f"{reason}: give them time to start and save, by more --time or a lower stop_seconds"
        last_reason = next((attempt.reason for attempt in reversed(self.attempts) if attempt.is_failure), "")
        return reason + (f"; the last: {last_reason}" if last_reason else "")

    def count_without_progress(self, submission: str) -> tuple[int, int]:
        """Count failures and stops of a submission since its last attempt that saved a checkpoint."""
        failures = stops = 0
        for attempt in reversed([past for past in self.attempts if past.submission == submission]):
            if attempt.made_progress:
                break
            failures += attempt.is_failure
            stops += attempt.ended is not None and not attempt.is_failure
        return failures, stops

    def find_faulty_hosts(self, now: float) -> list[str]:
        """Return the hosts on which the run failed at least MAX_HOST_FAILURES times within the last week."""
        recent = [attempt for attempt in self.attempts if attempt.time > now - HOST_FAILURE_WINDOW_SECONDS]
        counts = Counter(attempt.failed_host for attempt in recent if attempt.failed_host)
        return sorted(host for host, count in counts.items() if count >= MAX_HOST_FAILURES)

    def _update(self, change: Callable[[list[Attempt]], list[Attempt]]) -> None:
        """Read the file anew, change its attempts and write them, alone: two jobs or launchers may both do so."""
        with lock_path(self.run / RESTARTS, LOCK_SECONDS):
            self.attempts = change(self._read())
            if self._damaged:
                self._keep_damaged_file()
            atomic_write(self.run / RESTARTS, dump_attempts(self.attempts))

    def _try_to_update(self, change: Callable[[list[Attempt]], list[Attempt]]) -> None:
        try:
            self._update(change)
        except OSError as error:
            print_to_stderr(f"megatfm: {self.run / RESTARTS}: can't be written: {error.strerror}")

    def _read(self) -> list[Attempt]:
        self._damaged = ""
        attempts: list[Attempt] = []
        try:
            entries = json.loads((self.run / RESTARTS).read_bytes())
        except FileNotFoundError:
            return attempts
        except (OSError, ValueError, RecursionError) as error:
            self._damaged = f"all of it ({error})"
            return attempts
        if not isinstance(entries, list):
            self._damaged = "all of it, which is no list of attempts"
            return attempts
        for index, entry in enumerate(entries):
            try:
                attempts.append(_ATTEMPT.validate_python(entry))
            except ValidationError as error:
                location = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
                self._damaged = f"entry {index} and perhaps more ({location}: {error.errors()[0]['msg']})"
        return attempts

    def _keep_damaged_file(self) -> None:
        """Move the file aside before it is replaced: its attempts may be worth reading."""
        moved = self.run / f"{RESTARTS}.damaged-{secrets.token_hex(4)}"
        try:
            (self.run / RESTARTS).rename(moved)
        except FileNotFoundError:  # another job has moved it
            return
        print_to_stderr(f"megatfm: {self.run / RESTARTS}: damaged: {self._damaged}; kept as {moved.name}")


_ATTEMPT = TypeAdapter(Attempt)


def dump_attempts(attempts: Sequence[Attempt]) -> str:
    """Return the attempts as restarts.json stores them: an indented JSON list with one object per attempt."""
    return json.dumps([asdict(attempt) for attempt in attempts], indent=1) + "\n"
