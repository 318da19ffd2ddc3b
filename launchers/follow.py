"""The logs that matter: the job's own, in which rank 0 speaks (without a job, rank 0's), and those of ranks that had
trouble."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from megatfm.launchers.files import last_lines
from megatfm.launchers.progress import launcher_of

POLL_SECONDS = 0.5
TROUBLE = re.compile(
    r"\b(ERROR|CRITICAL|Traceback|Fatal Python error|Segmentation fault|Aborted|hangs?|hung|out of memory)\b"
)
_RANK = re.compile(r"(?:rank|worker)-(\d+)\.log")


@dataclass
class Tail:
    """One file that is followed: what of it was shown."""

    path: Path
    label: str
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)

    def news(self) -> Iterator[str]:
        """Whole lines that came since the last look. A file that became shorter is read from its start."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:
                    self.offset, self.rest = 0, b""
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")


def chosen(run: Path, everything: bool = False) -> dict[Path, str]:
    """The files that matter, with a short label each: all of them, or those of ranks with trouble. What rank 0 writes
    is in the job's log too."""
    launcher = launcher_of(run)
    jobs = launcher.logs(run) if launcher else []
    files = {path: "job" if len(jobs) == 1 else path.stem.rpartition("_")[2] for path in jobs}
    for path in sorted((run / "logs").glob("*.log"), key=_number):
        match = _RANK.fullmatch(path.name)
        if not match:
            continue
        wanted = not jobs if match[1] == "0" else any(map(TROUBLE.search, last_lines(path)))
        if everything or wanted:
            files[path] = path.stem.replace("-", " ")
    return files


def _number(path: Path) -> int:
    match = _RANK.fullmatch(path.name)
    return int(match[1]) if match else -1


def show(run: Path, count: int, everything: bool = False, out: TextIO | None = None) -> list[Tail]:
    """Print the last `count` lines of each file; returns where to go on from."""
    out, tails = out or sys.stdout, []
    for path, label in chosen(run, everything).items():
        tail = Tail(path, label)
        lines = list(tail.news())
        print(f"==> {path} <==", file=out)
        for line in lines[max(0, len(lines) - count) :]:
            print(line, file=out)
        tails.append(tail)
    out.flush()
    return tails


def follow(
    run: Path,
    tails: list[Tail],
    everything: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    out: TextIO | None = None,
) -> None:
    """Print new lines, each with its file's label, until `is_over`. Ranks that get into trouble join in."""
    out, known = out or sys.stdout, {tail.path: tail for tail in tails}
    while True:
        ending = is_over()  # asked first, so that the last words are still shown
        for path, label in chosen(run, everything).items():
            if path not in known:
                known[path] = Tail(path, label)
                print(f"==> {path} <==", file=out)
        width = max((len(tail.label) for tail in known.values()), default=0)
        for tail in known.values():
            for line in tail.news():
                print(f"{tail.label:<{width}} | {line}", file=out)
        out.flush()
        if ending:
            return
        time.sleep(POLL_SECONDS)
