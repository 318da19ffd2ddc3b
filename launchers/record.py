"""Files that a run directory holds for launchers and watchers: launch.json, restarts.json, the ends of its JSON lines.

`restarts.json` lists all attempts at a run, from which follows whether another one makes sense. Only launchers write
it: the job script's prolog and epilog, or `megatfm launch`.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS
from megatfm.files import atomic_write

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LAUNCH = "launch.json"
TAIL_BYTES = 2**18
BLOCK_BYTES = 2**16
LAST_EVENT_STATES = {"finished": "DONE", "stopped": "STOPPED"}
"""State of a run whose process is gone, by its last event."""
_COMMITTED = re.compile(r"step-(\d+)")


def read_json(path: Path, default: Any) -> Any:
    """Read a JSON file; return `default` where it is missing, unreadable, a FIFO or damaged."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else default
    except (OSError, ValueError, RecursionError):
        return default


def number_of(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record that others write; None where there is none. JSON has NaN and infinities as text."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def texts_of(record: Mapping[str, Any], key: str) -> list[str]:
    """A list of a record that others write, as texts; empty where there is none."""
    value = record.get(key)
    return [str(item) for item in value] if isinstance(value, list) else []


def read_launch_record(run: Path) -> dict[str, Any]:
    """Read how a run was started last: launcher, jobs or process, command; empty without a record.

    `evaluations`: SLURM jobs that were submitted beside it, and may still live.
    """
    record = read_json(run / LAUNCH, {})
    return record if isinstance(record, dict) else {}


def write_launch_record(run: Path, **facts: object) -> None:
    """Leave in the run directory how it was started, for status, logs and cancel. Raises OSError."""
    note = {"evaluations": texts_of(read_launch_record(run), "evaluations"), **facts}
    atomic_write(
        run / LAUNCH, json.dumps({**note, "time": time.time(), "command": sys.argv}, indent=1) + "\n"
    )


def record_evaluation_jobs(run: Path, jobs: Sequence[str]) -> None:
    """Leave these SLURM jobs beside what is noted of the run itself. Raises OSError."""
    atomic_write(
        run / LAUNCH, json.dumps({**read_launch_record(run), "evaluations": list(jobs)}, indent=1) + "\n"
    )


def latest_checkpoint_step(run: Path) -> int:
    """Step of the newest committed checkpoint, from its folder's name alone; 0 where there is none."""
    try:
        names = [_COMMITTED.fullmatch(path.name) for path in (run / "checkpoints").iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for match in names if match), default=0)


def finished(run: Path, steps: int) -> bool:
    """Whether the run's last event says that all of so many steps are done.

    An exit code is not enough: srun leaves with 0 when its node is taken away.
    """
    last = next(iter(tail_jsonl(run / EVENTS, 1)), {})
    if last.get("event") == "finished early":  # as train.patience asks
        return True
    return last.get("event") == "finished" and (number_of(last, "step") or 0) >= steps


def tail_jsonl(path: Path, count: int) -> list[dict[str, Any]]:
    """The last whole JSON lines of a file, at most `count`, the oldest first."""
    records: list[dict[str, Any]] = []
    for line in reversed_lines(path):
        if len(records) == count:
            break
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # torn by a kill
            continue
        if isinstance(record, dict):
            records.append(record)
    return records[::-1]


def start_of_last_lines(file: BinaryIO, count: int) -> int:
    """Offset of the last `count` lines, an unfinished one among them; reads blocks from the file's end."""
    position = end = file.seek(0, os.SEEK_END)
    missing = count
    while position > 0 and count > 0:
        start = max(0, position - BLOCK_BYTES)
        file.seek(start)
        block = file.read(position - start)
        if position == end:  # what ends the last line begins no other
            missing += block.endswith(b"\n")
        n_breaks = block.count(b"\n")
        if n_breaks >= missing:
            for _ in range(missing):
                block = block[: block.rindex(b"\n")]
            return start + len(block) + 1
        missing, position = missing - n_breaks, start
    return end if count <= 0 else 0


def reversed_lines(path: Path) -> Iterator[str]:
    """The lines at the end of a text file, the last one first; none where there is no such file."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read()
    except OSError:
        return
    yield from reversed(text.decode(errors="replace").splitlines())


# --- restarts.json --------------------------------------------------------------------------------------------------

RESTARTS = "restarts.json"
FINAL_EXIT_REASONS = {
    EXIT_OK: "done",
    EXIT_USAGE: "the command line or the config asks for what can't be",
    NO_PROGRESS: "restarts gain no new checkpoint",
    LOCKED: "another job trains this run",
}
"""Codes after which the same command would say the same again."""

UNFINISHED = "exit code 0, but events.jsonl has no `finished` event"

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
    """Id that restarts are counted under: the first job of the chain."""
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
        """State for `megatfm status`. One that was asked to stop is STOPPED, even if a signal killed it."""
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
            ended if (stored.job, stored.time) == (attempt.job, attempt.time) else stored
            for stored in self._read()
        ]
        self._save()
        return ended

    def unfinished_attempt(self, submission: str) -> Attempt | None:
        """Return the last attempt of a submission if its end isn't recorded."""
        last = next(
            (attempt for attempt in reversed(self.attempts) if attempt.submission == submission), None
        )
        return last if last and last.ended is None else None

    def attempt_of_job(self, job: str, restart: int) -> Attempt | None:
        """The attempt of one start of a job, whatever came after it: its script may outlive the next one's begin."""
        attempts = [attempt for attempt in self.attempts if (attempt.job, attempt.restart) == (job, restart)]
        return attempts[-1] if attempts else None

    def next_attempt(self, attempt: Attempt) -> Attempt | None:
        """The first attempt that began after this one."""
        return next((later for later in self.attempts if later.time > attempt.time), None)

    def restart_limit_reason(self, submission: str, max_restarts: int) -> str | None:
        """Why a submission shall not be tried again; None if it may be."""
        failures, stops = self.count_without_progress(submission)
        if failures > max_restarts:
            cause = f"{failures} attempts in a row failed" if failures > 1 else "it failed"
        elif stops > MAX_STOPS_WITHOUT_PROGRESS:
            cause = f"{stops} attempts in a row were stopped"
        else:
            return None
        reason = f"{cause} without a new checkpoint after step {latest_checkpoint_step(self.run)}"
        if failures <= max_restarts:
            return f"{reason}: they need more time to start and save, by more --time or a lower stop_seconds"
        last = next((attempt.reason for attempt in reversed(self.attempts) if attempt.is_failure), "")
        return reason + (f"; the last: {last}" if last else "")

    def count_without_progress(self, submission: str) -> tuple[int, int]:
        """Failures and stops of a submission since its last attempt that gained a checkpoint."""
        failures = stops = 0
        for attempt in reversed([past for past in self.attempts if past.submission == submission]):
            if attempt.made_progress:
                break
            failures += attempt.is_failure
            stops += attempt.ended is not None and not attempt.is_failure
        return failures, stops

    def faulty_hosts(self, now: float) -> list[str]:
        """Hosts on which the run failed twice or more of late."""
        recent = [attempt for attempt in self.attempts if attempt.time > now - HOST_FAILURE_WINDOW_S]
        counts = Counter(attempt.failed_host for attempt in recent if attempt.failed_host)
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
                location = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
                self._damaged = f"entry {number} and perhaps more ({location}: {error.errors()[0]['msg']})"
        return attempts

    def _save(self) -> None:
        atomic_write(self.run / RESTARTS, dump(self.attempts))


_ATTEMPT = TypeAdapter(Attempt)


def dump(attempts: Sequence[Attempt]) -> str:
    """The text of the file of restarts: indented JSON, an object for each."""
    return json.dumps([asdict(attempt) for attempt in attempts], indent=1) + "\n"
