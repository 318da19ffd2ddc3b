"""What became of each attempt at a run (`RUN/restarts.json`), and so whether another one makes sense.

Only who starts and restarts a run writes the file: the helpers of job scripts, or `megatfm launch`.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatfm.atomic import atomic_write
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS
from megatfm.launchers.files import latest_checkpoint_step

RESTARTS = "restarts.json"
FINAL_EXIT_REASONS = {
    EXIT_OK: "done",
    EXIT_USAGE: "the command line or the config asks for what can't be",
    NO_PROGRESS: "restarts gain no new checkpoint",
    LOCKED: "another job trains this run",
}
"""Codes after which the same command would say the same again."""

UNFINISHED = "it left with 0, but the run has not recorded that it is finished"

MAX_STOPS_WITHOUT_PROGRESS = 10
"""Stops by a signal in a row that saved nothing, say a time limit shorter than the start: more are no accident."""
MAX_HOST_FAILURES = 2
HOST_FAILURE_WINDOW_S = 7 * 86400.0  # by then a broken node was repaired, or drained by the site


@dataclass(frozen=True)
class Attempt:
    """One start of a run. `code` is None while it goes on, and for one that was lost with its job script."""

    time: float
    """Seconds since 1970 at which it began."""
    submission: str
    """What its limits are counted over: the same for all restarts of a job and all links of a chain."""
    job: str = ""
    restart: int = 0
    nodes: list[str] = field(default_factory=list)
    first_step: int = 0
    """Newest checkpoint when it began."""
    step: int = 0
    """Newest checkpoint when it ended."""
    code: int | None = None
    asked: bool = False
    """Whether it was asked to stop: by the time limit, preemption or a person."""
    reason: str = ""
    failed_host: str | None = None
    failed_rank: int | None = None
    ended: float | None = None

    @property
    def made_progress(self) -> bool:
        """Whether it left a newer checkpoint than it began with."""
        return self.step > self.first_step

    @property
    def is_failure(self) -> bool:
        """Whether it ended by itself, and not well."""
        return self.ended is not None and self.code not in (EXIT_OK, EXIT_REQUEUE) and not self.asked

    @property
    def state_name(self) -> str:
        """What `status` calls its end. Who was asked to stop has stopped, even if it died of the signal."""
        words = {EXIT_OK: "DONE", EXIT_REQUEUE: "STOPPED", NO_PROGRESS: "NO PROGRESS"}
        return words.get(
            EXIT_FAILED if self.code is None else self.code, "STOPPED" if self.asked else "FAILED"
        )


class AttemptLog:
    """The attempts at a run, the oldest first."""

    def __init__(self, run: Path) -> None:
        """Read what there is; what is damaged is named on stderr, and left out."""
        self.run = run
        self.attempts = self._read()
        if self._damaged:
            print(f"megatfm: {run / RESTARTS}: left out: {self._damaged}", file=sys.stderr)

    def begin(self, attempt: Attempt) -> Attempt:
        """Note that an attempt begins; returns it with the step that it begins at."""
        attempt = replace(attempt, first_step=latest_checkpoint_step(self.run))
        self.attempts = [*self._read(), attempt]
        self._save()
        return attempt

    def end(self, attempt: Attempt) -> Attempt:
        """Note how an attempt ended; returns it with the step that it came to."""
        ended = replace(attempt, step=latest_checkpoint_step(self.run))
        self.attempts = [
            ended if (each.job, each.time) == (attempt.job, attempt.time) else each for each in self._read()
        ]
        self._save()
        return ended

    def unfinished_attempt(self, submission: str) -> Attempt | None:
        """The last attempt of a submission if nobody has noted its end."""
        last = next((each for each in reversed(self.attempts) if each.submission == submission), None)
        return last if last and last.ended is None else None

    def attempt_of_job(self, job: str, restart: int) -> Attempt | None:
        """The attempt of one start of a job, whatever came after it: its script may outlive the next one's begin."""
        mine = [each for each in self.attempts if (each.job, each.restart) == (job, restart)]
        return mine[-1] if mine else None

    def next_attempt(self, attempt: Attempt) -> Attempt | None:
        """The first attempt that began after this one."""
        return next((each for each in self.attempts if each.time > attempt.time), None)

    def restart_limit_reason(self, submission: str, max_restarts: int) -> str | None:
        """Why a submission shall not be tried again; None if it may be."""
        failures, stops = self.count_without_progress(submission)
        if failures > max_restarts:
            why = f"{failures} attempts in a row failed" if failures > 1 else "it failed"
        elif stops > MAX_STOPS_WITHOUT_PROGRESS:
            why = f"{stops} attempts in a row were stopped"
        else:
            return None
        said = f"{why} without a new checkpoint after step {latest_checkpoint_step(self.run)}"
        if failures <= max_restarts:
            return f"{said}: they need more time to start and save, by more --time or a lower stop_seconds"
        last = next((each.reason for each in reversed(self.attempts) if each.is_failure), "")
        return said + (f"; the last: {last}" if last else "")

    def count_without_progress(self, submission: str) -> tuple[int, int]:
        """Failures and stops of a submission since its last attempt that gained a checkpoint."""
        failures = stops = 0
        for attempt in reversed([each for each in self.attempts if each.submission == submission]):
            if attempt.made_progress:
                break
            failures += attempt.is_failure
            stops += attempt.ended is not None and not attempt.is_failure
        return failures, stops

    def faulty_hosts(self, now: float) -> list[str]:
        """Hosts on which the run failed twice or more of late."""
        recent = [each for each in self.attempts if each.time > now - HOST_FAILURE_WINDOW_S]
        counts = Counter(each.failed_host for each in recent if each.failed_host)
        return sorted(host for host, count in counts.items() if count >= MAX_HOST_FAILURES)

    def _read(self) -> list[Attempt]:
        """Afresh before each change: a link of a chain and the one before it may both be writing."""
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
        for number, entry in enumerate(entries):
            try:
                attempts.append(_ATTEMPT.validate_python(entry))
            except ValidationError as error:
                where = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
                self._damaged = f"entry {number} and perhaps more ({where}: {error.errors()[0]['msg']})"
        return attempts

    def _save(self) -> None:
        atomic_write(self.run / RESTARTS, dump(self.attempts))


_ATTEMPT = TypeAdapter(Attempt)


def dump(attempts: Sequence[Attempt]) -> str:
    """The text of the file of restarts: indented JSON, an object each."""
    return json.dumps([asdict(each) for each in attempts], indent=1) + "\n"
