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
from megatfm.terminal import format_counted, format_file_size

SECONDS_BETWEEN_LINES = 10.0

UpdateProgress = Callable[[int], None]


class Reporter:
    """Shows stages on a console: a bar on a terminal, lines with the time in a log.

    task: number of this task, counted from 1, and how many there are; lines name it if there are several.
    """

    def __init__(self, console: Console | None = None, task: tuple[int, int] = (1, 1)) -> None:
        self.console = console or Console(stderr=True)
        self._prefix = f"task {task[0]}/{task[1]} | " if task[1] > 1 else ""

    def log(self, line: str) -> None:
        """Print a line with the time."""
        text = f"{time.strftime('%H:%M:%S')} {self._prefix}{line}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int, unit: str = "bytes") -> Iterator[UpdateProgress]:
        """Show a running stage. Yields the function to call with progress, in the unit of `total`."""
        start = time.monotonic()
        if self.console.is_terminal:
            columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            with Progress(*columns, console=self.console, transient=True) as bar:
                task = bar.add_task(name, total=total)
                yield lambda amount: bar.advance(task, amount)
        else:
            yield self._print_progress(name, total, unit)
        self.log(f"{name} | done in {time.monotonic() - start:.1f} s")

    def _print_progress(self, name: str, total: int, unit: str) -> UpdateProgress:
        done, last_line = 0, (start := time.monotonic())

        def update(amount: int) -> None:
            nonlocal done, last_line
            done += amount
            if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                self.log(f"{name} | {_format_progress(last_line - start, done, total, unit)}")

        return update


def _format_progress(seconds: float, done: int, total: int, unit: str) -> str:
    """Format how much is done, how fast, and how long the remaining work takes at that speed."""
    speed = int(done / max(seconds, 1e-9))
    percent = 100 * done // max(total, 1)
    if unit == "bytes":
        text = f"{percent} %: {format_file_size(done)} of {format_file_size(total)}, {format_file_size(speed)}/s"
    else:
        text = f"{percent} %: {done:,} of {total:,} {unit}, {speed:,}/s"
    if not 0 < done < total:
        return text
    seconds_left = round(seconds * (total - done) / done)
    hours, minutes = seconds_left // 3600, seconds_left % 3600 // 60
    return f"{text}, {f'{hours} h {minutes} min' if hours else f'{minutes} min {seconds_left % 60} s'} left"


def track_progress(documents: Iterator[Document], advance: UpdateProgress) -> Iterator[Document]:
    """Yield the documents, and call `advance` with the bytes of each finished one."""
    for document in documents:
        yield document
        advance(document.text_bytes)


@dataclass(frozen=True)
class PrepSummary:
    """Folder or URL of a finished corpus, and the contents of `prep.json`; `already_done` if there was nothing to
    do."""

    out: Path | str
    result: dict[str, Any]
    already_done: bool

    def to_table(self) -> Table:
        """Tabulate the documents that every step kept and dropped, and the two corpora; bytes are those of text."""
        headings = ("step", "documents", "bytes", "changed", "dropped, or written")
        table = Table(*headings, title=str(self.out), title_justify="left")
        for column in table.columns[1:4]:
            column.justify = "right"
        table.columns[4].overflow = "fold"  # no reason is cut
        for step in self.result["steps"]:
            dropped = "\n".join(f"{drop['documents']:,} {reason}" for reason, drop in step["dropped"].items())
            table.add_row(
                step["step"],
                f"{step['documents_out']:,}",
                format_file_size(step["bytes_out"]),
                f"{step['changed']:,}",
                dropped,
            )
        table.add_section()
        for name in ("train", "validation"):
            totals = self.result[name]
            tokens = (
                f"{totals['tokens']:,} tokens of {totals['bytes_per_token']:.2f} bytes, " if totals["tokens"] else ""
            )
            table.add_row(
                name,
                f"{totals['documents']:,}",
                format_file_size(totals["text_bytes"]) if totals["text_bytes"] else "",  # images alone have no text
                "",
                f"{tokens}{format_counted(totals['shards'], 'shard')}",
            )
        return table
