"""Log files of a run: the job's own (without a job, rank 0's), and those of ranks that logged errors."""

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from megatfm.launchers.record import TAIL_BYTES, start_of_last_lines
from megatfm.launchers.run_jobs import job_ids

POLL_SECONDS = 0.5
LINE_BYTES = 4096
"""Bytes kept of a line that the last look ended in; longer ones begin with the error."""
ERROR_PATTERN = re.compile(
    r"\b(ERROR|CRITICAL|Traceback|Fatal Python error|Segmentation fault|Aborted|hangs?|hung|out of memory)\b"
)
_RANK = re.compile(r"(?:rank|worker)-(\d+)\.log")


@dataclass
class Tail:
    """One file that is followed: what of it was shown."""

    path: Path
    label: str
    offset: int = 0
    unfinished: bytes = field(default=b"", repr=False)

    def begin(self, count: int) -> None:
        """Leave out what comes before the last `count` lines."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            self.offset = start_of_last_lines(file, count)

    def read_new_lines(self) -> Iterator[str]:
        """Yield the complete lines since the last look. A file that became shorter is read from its start."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset, self.unfinished = 0, b""
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        self.offset += len(data)
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        yield from map(_shown, lines)

    def end(self) -> Iterator[str]:
        """The last line where it was never finished, as by a process that was killed."""
        if self.unfinished:
            yield _shown(self.unfinished)
        self.unfinished = b""


def _shown(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


class Troubles:
    """Return the ranks' logs that contain errors; a log is read once, and later only its new part."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, bool]] = {}

    def has(self, path: Path) -> bool:
        """Whether there is any in the last part of a file, or was when it was looked at before."""
        n_read, has_error = self._seen.get(path, (0, False))
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < n_read:
                    n_read, has_error = 0, False
                if not has_error and size > n_read:
                    # The line in which the last look ended is looked at again.
                    file.seek(max(0, size - TAIL_BYTES, n_read - LINE_BYTES))
                    has_error = (
                        ERROR_PATTERN.search(file.read(TAIL_BYTES + LINE_BYTES).decode(errors="replace"))
                        is not None
                    )
        except OSError:
            return has_error
        self._seen[path] = size, has_error
        return has_error


def select_logs(run: Path, all_ranks: bool = False, troubles: Troubles | None = None) -> dict[Path, str]:
    """The files that matter, with a short label each: all of them, or those of ranks with trouble. What rank 0 writes
    is in the job's log too. troubles: what earlier looks have found."""
    jobs, troubles = job_logs(run), troubles or Troubles()
    files = {path: "job" if len(jobs) == 1 else path.stem.rpartition("_")[2] for path in jobs}
    for path in sorted((run / "logs").glob("*.log"), key=_number):
        match = _RANK.fullmatch(path.name)
        if not match:
            continue
        if all_ranks or (not jobs if match[1] == "0" else troubles.has(path)):
            files[path] = path.stem.replace("-", " ")
    return files


def job_logs(run: Path) -> list[Path]:
    """The batch log of the SLURM job that ran last, or of each task of its array; none without a job."""
    for job in reversed(job_ids(run)):
        if logs := sorted((run / "logs").glob(f"slurm-{job}.log")) or sorted(
            (run / "logs").glob(f"slurm-{job}_*.log")
        ):
            return logs
    return []


def _number(path: Path) -> int:
    match = _RANK.fullmatch(path.name)
    return int(match[1]) if match else -1


def print_tails(
    run: Path, count: int, everything: bool = False, out: TextIO | None = None, *, to_the_end: bool = False
) -> list[Tail]:
    """Print the last `count` lines of each file; returns where to go on from.

    to_the_end: also a last line that isn't finished, which who goes on would print in two parts.
    """
    out, tails = out or sys.stdout, []
    for path, label in select_logs(run, everything).items():
        tail = Tail(path, label)
        tail.begin(count)
        print(f"==> {path} <==", file=out)
        for line in tail.read_new_lines():
            print(line, file=out)
        for line in tail.end() if to_the_end else ():
            print(line, file=out)
        tails.append(tail)
    out.flush()
    return tails


def follow_logs(
    run: Path,
    tails: list[Tail],
    everything: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    out: TextIO | None = None,
) -> None:
    """Print new lines, each with its file's label, until `is_over`. Ranks that get into trouble join in."""
    out, tail_of, troubles = out or sys.stdout, {tail.path: tail for tail in tails}, Troubles()
    while True:
        ending = is_over()  # asked first, so that the last words are still shown
        for path, label in select_logs(run, everything, troubles).items():
            if path not in tail_of:
                tail_of[path] = Tail(path, label)
                print(f"==> {path} <==", file=out)
        width = max((len(tail.label) for tail in tail_of.values()), default=0)
        for tail in tail_of.values():
            for line in itertools.chain(tail.read_new_lines(), tail.end() if ending else ()):
                print(f"{tail.label:<{width}} | {line}", file=out)
        out.flush()
        if ending:
            return
        time.sleep(POLL_SECONDS)
