"""Progress and summary for people: a bar on a terminal, lines in a log, and the table at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatfm.data_prep.documents import Document

SECONDS_BETWEEN_LINES = 10.0

UpdateProgress = Callable[[int], None]
_SKIPPED = "skipped: committed by an earlier run"


class Reporter:
    """Shows the stages of a long work on a console: a bar on a terminal, lines with the time in a log.

    task: which task of how many this is, counted from 1; where there are several, lines say so.
    """

    def __init__(self, console: Console | None = None, task: tuple[int, int] = (1, 1)) -> None:
        self.console = console or Console(stderr=True)
        self._prefix = f"task {task[0]}/{task[1]} | " if task[1] > 1 else ""
        self._skipped: list[bool] = []
        """For each stage that is open, whether it turned out to be committed before."""

    def log(self, line: str) -> None:
        """Print a line with the time."""
        text = f"{time.strftime('%H:%M:%S')} {self._prefix}{line}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def skip(self, name: str) -> None:
        """Say that a stage was committed by an earlier run: at the end of the open stage, if there is one."""
        if self._skipped:
            self._skipped[-1] = True
        else:
            self.log(f"{name} | {_SKIPPED}")

    @contextmanager
    def stage(self, name: str, total: int, unit: str = "bytes") -> Iterator[UpdateProgress]:
        """Show that a stage runs. The function that it yields is told of progress, in the unit of `total`."""
        start = time.monotonic()
        self._skipped.append(False)
        try:
            if self.console.is_terminal:
                columns = (
                    TextColumn("{task.description:<28}"),
                    BarColumn(),
                    TaskProgressColumn(),
                    TimeRemainingColumn(),
                )
                with Progress(*columns, console=self.console, transient=True) as bar:
                    task = bar.add_task(name, total=total)
                    yield lambda amount: bar.advance(task, amount)
            else:
                yield self._lines(name, total, unit)
        except BaseException:
            self._skipped.pop()
            raise
        is_skipped = self._skipped.pop()
        self.log(f"{name} | {_SKIPPED if is_skipped else f'done in {time.monotonic() - start:.1f} s'}")

    def _lines(self, name: str, total: int, unit: str) -> UpdateProgress:
        done, last = 0, (start := time.monotonic())

        def update(amount: int) -> None:
            nonlocal done, last
            done += amount
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.log(f"{name} | {_format_progress(last - start, done, total, unit)}")

        return update


def _format_progress(seconds: float, done: int, total: int, unit: str) -> str:
    """Format how much is done, how fast, and how long the remaining work takes at that speed."""
    speed = int(done / max(seconds, 1e-9))
    percent = 100 * done // max(total, 1)
    if unit == "bytes":
        text = f"{percent} %: {_size(done)} of {_size(total)}, {_size(speed)}/s"
    else:
        text = f"{percent} %: {done:,} of {total:,} {unit}, {speed:,}/s"
    if not 0 < done < total:
        return text
    left = round(seconds * (total - done) / done)
    hours, minutes = left // 3600, left % 3600 // 60
    return f"{text}, {f'{hours} h {minutes} min' if hours else f'{minutes} min {left % 60} s'} left"


def track_progress(documents: Iterator[Document], advance: UpdateProgress) -> Iterator[Document]:
    """The documents; `advance` is told of the bytes of each that is done."""
    for document in documents:
        yield document
        advance(document.text_bytes)


@dataclass(frozen=True)
class PrepSummary:
    """The folder that a prep made, or its URL, and the contents of `prep.json`; `already_done` if it did nothing."""

    out: Path | str
    result: dict[str, Any]
    already_done: bool

    def table(self) -> Table:
        """Show what every step kept and dropped, and the two corpora that came out."""
        table = Table(
            "step", "documents", "bytes", "changed", "dropped", title=str(self.out), title_justify="left"
        )
        for column in table.columns[1:4]:
            column.justify = "right"
        for step in self.result["steps"]:
            dropped = "; ".join(
                f"{drop['documents']:,}: {reason}" for reason, drop in step["dropped"].items()
            )
            table.add_row(
                step["step"],
                f"{step['documents_out']:,}",
                _size(step["bytes_out"]),
                f"{step['changed']:,}",
                dropped,
            )
        table.add_section()
        for name in ("train", "validation"):
            totals = self.result[name]
            tokens = (
                f"{totals['tokens']:,} tokens of {totals['bytes_per_token']:.2f} bytes, "
                if totals["tokens"]
                else ""
            )
            table.add_row(
                name,
                f"{totals['documents']:,}",
                _size(totals["text_bytes"]),
                "",
                f"{tokens}{totals['shards']} shard(s)",
            )
        return table


def _size(count: int) -> str:
    """Format a number of bytes."""
    if count >= 10**9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.2f} MB" if count >= 10**5 else f"{count:,} B"
