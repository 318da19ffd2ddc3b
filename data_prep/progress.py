"""Progress for people: a bar on a terminal, a plain line now and then in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megatfm.data_prep.documents import Document

SECONDS_BETWEEN_LINES = 10.0

UpdateProgress = Callable[[int], None]


class Reporter:
    """Shows the stages of a long work on a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)

    def log(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[UpdateProgress]:
        """Show that a stage runs. The function that it yields is told of progress, in the unit of `total`."""
        begin = time.monotonic()
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description:<28}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.console, transient=True) as bar:
                task = bar.add_task(title, total=total)
                yield lambda amount: bar.advance(task, amount)
        else:
            yield self._lines(title, total)
        self.log(f"{title}: done in {time.monotonic() - begin:.1f} s")

    def _lines(self, title: str, total: int) -> UpdateProgress:
        done, said = 0, (begin := time.monotonic())

        def update(amount: int) -> None:
            nonlocal done, said
            done += amount
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                self.log(f"{title}: {100 * done // max(total, 1)} %{_format_eta(said - begin, done, total)}")

        return update


def _format_eta(seconds: float, done: int, total: int) -> str:
    """How long the rest will take if it goes on like that."""
    if not 0 < done < total:
        return ""
    left = round(seconds * (total - done) / done)
    hours, minutes = left // 3600, left % 3600 // 60
    return f", about {hours} h {minutes} min left" if hours else f", about {minutes} min {left % 60} s left"


def track_progress(documents: Iterator[Document], advance: UpdateProgress) -> Iterator[Document]:
    """The documents; `advance` is told of the bytes of each that is done."""
    for document in documents:
        yield document
        advance(document.text_bytes)
