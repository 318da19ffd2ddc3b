"""Small files that are there whole or not at all, and what a run leaves for whoever watches it."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatfm.atomic import atomic_write

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LAUNCH = "launch.json"
TAIL_BYTES = 2**18
BLOCK_BYTES = 2**16
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
    return [str(each) for each in value] if isinstance(value, list) else []


def read_launch_record(run: Path) -> dict[str, Any]:
    """How a run was started last: launcher, jobs or process, command; nothing where nobody noted it.

    `evaluations`: SLURM jobs that were submitted beside it, and may still live.
    """
    found = read_json(run / LAUNCH, {})
    return found if isinstance(found, dict) else {}


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
        found = [_COMMITTED.fullmatch(path.name) for path in (run / "checkpoints").iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for match in found if match), default=0)


def finished(run: Path, steps: int) -> bool:
    """Whether the last thing that the run itself recorded is that all of so many steps are done.

    An exit code is not enough: srun leaves with 0 when its node is taken away.
    """
    last = next(iter(tail_jsonl(run / EVENTS, 1)), {})
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
    """Where the last `count` lines of a file begin, an unfinished one among them; read from its end, block by block."""
    position = end = file.seek(0, os.SEEK_END)
    wanted = count
    while position > 0 and count > 0:
        start = max(0, position - BLOCK_BYTES)
        file.seek(start)
        block = file.read(position - start)
        if position == end:  # what ends the last line begins no other
            wanted += block.endswith(b"\n")
        found = block.count(b"\n")
        if found >= wanted:
            for _ in range(wanted):
                block = block[: block.rindex(b"\n")]
            return start + len(block) + 1
        wanted, position = wanted - found, start
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
