"""Shows the logs of a run: the job's log (without a job, rank 0's), and those of ranks that logged errors."""

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from megatfm.launchers.record import TAIL_BYTES
from megatfm.launchers.run_jobs import read_evaluation_job_ids, read_job_ids

POLL_SECONDS = 0.5
BLOCK_BYTES = 2**16
LINE_BYTES = 4096
"""Bytes before the last read position that are searched again, for errors in a line that was incomplete then."""
ERROR_PATTERN = re.compile(
    r"\b(ERROR|CRITICAL|Traceback|Fatal Python error|Segmentation fault|Aborted|hangs?|hung|out of memory)\b"
)
_RANK = re.compile(r"(?:rank|worker)-(\d+)\.log")


def find_start_of_last_lines(file: BinaryIO, count: int) -> int:
    """Return the offset at which the last `count` lines begin. A line without line break counts, too.

    Reads the file in blocks from its end.
    """
    position = end = file.seek(0, os.SEEK_END)
    missing = count
    while position > 0 and count > 0:
        start = max(0, position - BLOCK_BYTES)
        file.seek(start)
        block = file.read(position - start)
        if position == end:  # the line break at the end of the file starts no line
            missing += block.endswith(b"\n")
        n_breaks = block.count(b"\n")
        if n_breaks >= missing:
            for _ in range(missing):
                block = block[: block.rindex(b"\n")]
            return start + len(block) + 1
        missing, position = missing - n_breaks, start
    return end if count <= 0 else 0


@dataclass
class Tail:
    """A log file that is followed, and the offset up to which it has been shown."""

    path: Path
    label: str
    offset: int = 0
    unfinished: bytes = field(default=b"", repr=False)

    def begin(self, count: int) -> None:
        """Skip to the last `count` lines."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            self.offset = find_start_of_last_lines(file, count)

    def read_new_lines(self) -> Iterator[str]:
        """Yield the complete lines since the last call. A file that became shorter is read from its start."""
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
        yield from map(_decode_line, lines)

    def read_unfinished_line(self) -> Iterator[str]:
        """Yield the last line if it has no line break, for example because its process was killed."""
        if self.unfinished:
            yield _decode_line(self.unfinished)
        self.unfinished = b""


def _decode_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


class ErrorScanner:
    """Finds logs that contain errors. Reads only the part of a log that was added since the last scan."""

    def __init__(self) -> None:
        self._results: dict[Path, tuple[int, bool]] = {}
        """Log → bytes scanned, and whether they contain an error."""

    def has_error(self, path: Path) -> bool:
        """Scan a log's new bytes, at most TAIL_BYTES; return whether this or an earlier scan found an error."""
        n_read, has_error = self._results.get(path, (0, False))
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < n_read:
                    n_read, has_error = 0, False
                if not has_error and size > n_read:
                    # Rescan the line in which the last scan ended.
                    file.seek(max(0, size - TAIL_BYTES, n_read - LINE_BYTES))
                    has_error = (
                        ERROR_PATTERN.search(file.read(TAIL_BYTES + LINE_BYTES).decode(errors="replace")) is not None
                    )
        except OSError:
            return has_error
        self._results[path] = size, has_error
        return has_error


def select_logs(run: Path, all_ranks: bool = False, scanner: ErrorScanner | None = None) -> dict[Path, str]:
    """Return the logs to show, path → short label: the jobs' logs, and those of all ranks or of ranks with errors.

    Omits rank 0's log if there is a job, whose log contains it. scanner: one that has scanned the logs before.
    """
    batch_logs, scanner = find_job_logs(run), scanner or ErrorScanner()
    labels = {path: "job" if len(batch_logs) == 1 else path.stem.rpartition("_")[2] for path in batch_logs}
    evaluation_logs = {run / "logs" / f"slurm-{job}.log": f"job {job}" for job in read_evaluation_job_ids(run)}
    labels |= {path: label for path, label in evaluation_logs.items() if path.exists()}
    for path in sorted((run / "logs").glob("*.log"), key=_get_log_rank):
        rank = _get_log_rank(path)
        if rank < 0:
            continue
        if all_ranks or (not batch_logs if rank == 0 else scanner.has_error(path)):
            labels[path] = path.stem.replace("-", " ")
    return labels


def find_job_logs(run: Path) -> list[Path]:
    """Return the log of the SLURM job that ran last, or those of all tasks of its array; none without a job."""
    for job in reversed(read_job_ids(run)):
        if logs := sorted((run / "logs").glob(f"slurm-{job}.log")) or sorted((run / "logs").glob(f"slurm-{job}_*.log")):
            return logs
    return []


def _get_log_rank(path: Path) -> int:
    match = _RANK.fullmatch(path.name)
    return int(match[1]) if match else -1


def print_tails(
    run: Path, count: int, all_ranks: bool = False, out: TextIO | None = None, *, include_unfinished: bool = False
) -> list[Tail]:
    """Print the last `count` lines of each log; return the tails, from which `follow_logs` can continue.

    include_unfinished: also print a last line without line break. Following would then print such a line in two parts.
    """
    out, tails = out or sys.stdout, []
    for path, label in select_logs(run, all_ranks).items():
        tail = Tail(path, label)
        tail.begin(count)
        print(f"==> {path} <==", file=out)
        for line in tail.read_new_lines():
            print(line, file=out)
        for line in tail.read_unfinished_line() if include_unfinished else ():
            print(line, file=out)
        tails.append(tail)
    out.flush()
    return tails


def follow_logs(
    run: Path,
    tails: list[Tail],
    all_ranks: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    out: TextIO | None = None,
) -> None:
    """Print new lines with their log's label until `is_over`. The log of a rank is added when it contains an error."""
    out, tail_of_path, scanner = out or sys.stdout, {tail.path: tail for tail in tails}, ErrorScanner()
    while True:
        has_ended = is_over()  # before the last read, so that no line is missed
        for path, label in select_logs(run, all_ranks, scanner).items():
            if path not in tail_of_path:
                tail_of_path[path] = Tail(path, label)
                print(f"==> {path} <==", file=out)
        width = max((len(tail.label) for tail in tail_of_path.values()), default=0)
        for tail in tail_of_path.values():
            for line in itertools.chain(tail.read_new_lines(), tail.read_unfinished_line() if has_ended else ()):
                print(f"{tail.label:<{width}} | {line}", file=out)
        out.flush()
        if has_ended:
            return
        time.sleep(POLL_SECONDS)
