"""Reads and writes what launchers need in a run directory: launch.json, the newest checkpoint, the last events."""

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatfm.files import atomic_write, is_copied_record, lock_path

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LAUNCH = "launch.json"
TAIL_BYTES = 2**18
LAUNCH_LOCK_SECONDS = 60.0
"""Longest wait for another launcher of a run, which may wait for sbatch."""
EVENT_STATES = {
    "started": "ENDED",
    "resumed": "ENDED",
    "failed": "ENDED",
    "stopped": "STOPPED",
    "finished": "DONE",
    "finished early": "DONE",
}
"""Last of these events of a run whose process is gone → state of the run. Other events, such as `refused`, change no
state."""
_STEP_DIR = re.compile(r"step-(\d+)")


def read_json_if_valid(path: Path, default: Any) -> Any:
    """Read a JSON file; return `default` if it is missing, unreadable, not a regular file, or damaged."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else default
    except (OSError, ValueError, RecursionError):
        return default


def get_number(record: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a JSON record; None if missing or malformed. NaN and infinities may be stored as text."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def get_finite_number(record: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a JSON record; None if missing, malformed, NaN or infinite."""
    number = get_number(record, key)
    return number if number is not None and math.isfinite(number) else None


def get_texts(record: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of a JSON record as strings; empty if missing or malformed."""
    value = record.get(key)
    return [str(item) for item in value] if isinstance(value, list) else []


def read_launch_record(run: Path) -> dict[str, Any]:
    """Read launch.json, which describes the last launch of a run: launcher, jobs or process, command; {} if missing.

    Its `evaluations` are SLURM jobs that evaluate the run, and may still run. In a copy of another run's folder, jobs
    and process are that run's, so only `kind` counts.
    """
    record = read_json_if_valid(run / LAUNCH, {})
    if not isinstance(record, dict):
        return {}
    return {key: record[key] for key in record.keys() & {"kind"}} if is_copied_record(record, run) else record


def lock_launch_record(run: Path) -> contextlib.AbstractContextManager[None]:
    """Let no other launcher of the run start or record anything meanwhile."""
    return lock_path(run / LAUNCH, LAUNCH_LOCK_SECONDS)


def write_launch_record(run: Path, **fields: object) -> None:
    """Write launch.json, for `megatfm status`, `logs` and `cancel`; keeps its `evaluations`. Raises OSError.

    The caller holds `lock_launch_record`.
    """
    record = {"run": str(run), "evaluations": get_texts(read_launch_record(run), "evaluations"), **fields}
    atomic_write(run / LAUNCH, json.dumps({**record, "time": time.time(), "command": sys.argv}, indent=1) + "\n")


def record_evaluation_jobs(run: Path, jobs: Sequence[str]) -> None:
    """Write the ids of evaluation jobs into launch.json, without changing its other fields. Raises OSError.

    The caller holds `lock_launch_record`.
    """
    record = {**read_launch_record(run), "run": str(run), "evaluations": list(jobs)}
    atomic_write(run / LAUNCH, json.dumps(record, indent=1) + "\n")


def list_checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of a run's committed checkpoints in ascending order, read from their folders' names."""
    try:
        names = [_STEP_DIR.fullmatch(path.name) for path in (run / "checkpoints").iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in names if match)


def find_latest_checkpoint_step(run: Path) -> int:
    """Return the step of the newest committed checkpoint; 0 if there is none."""
    return max(list_checkpoint_steps(run), default=0)


def is_finished(run: Path, steps: int) -> bool:
    """Return whether the run's last event says that all `steps` are done, or that early stopping ended it.

    The exit code is not enough: srun exits with 0 when its node is taken away.
    """
    last_event = read_last_state_event(run)
    if last_event.get("event") == "finished early":  # train.patience
        return True
    return last_event.get("event") == "finished" and (get_number(last_event, "step") or 0) >= steps


def read_last_state_event(run: Path) -> dict[str, Any]:
    """Return the last event of a run that says its state; {} if there is none."""
    events = _iter_reversed_jsonl(run / EVENTS)
    return next((event for event in events if str(event.get("event")) in EVENT_STATES), {})


def tail_jsonl(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last `count` complete JSON lines of a file, oldest first; fewer if it has no more."""
    return list(islice(_iter_reversed_jsonl(path), count))[::-1]


def _iter_reversed_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete JSON objects in the last TAIL_BYTES of a file, last line first."""
    for line in iter_reversed_lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the process was killed while it wrote this line
            continue
        if isinstance(record, dict):
            yield record


def iter_reversed_lines(path: Path) -> Iterator[str]:
    """Yield the lines in the last TAIL_BYTES of a text file, last line first; nothing if there is no such file."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read()
    except OSError:
        return
    # Not splitlines: JSON leaves U+2028 and the like as they are.
    yield from reversed(text.decode(errors="replace").split("\n"))
