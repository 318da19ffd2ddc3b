"""Progress for people: a bar on a terminal, a plain line now and then in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from data_prep.documents import Document
from data_prep.summary import percent

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_STEPS = 0.25
"""Between two looks of a bar on a terminal."""

Advance = Callable[[int], None]


class Parts:
    """How far a stage is that several processes do in parts, perhaps after an interruption."""

    def __init__(self, count: int, is_done: Callable[[int], bool]) -> None:
        self._count, self._is_done = count, is_done
        self._left = list(range(count))
        self._mine = 0
        self.first = self.share(0, 1)
        """The share that was done before this process began."""

    def end(self, done: int) -> None:
        """A part of this process has ended, with which it has done so much in all."""
        self._mine = done

    def share(self, done: int, total: int) -> float:
        """The share of the work that all have done, given how much of `total` this process has: its part in progress
        counts as far as it is, if it is one of the usual size."""
        self._left = [part for part in self._left if not self._is_done(part)]
        begun = min(1.0, (done - self._mine) * self._count / max(total, 1))
        return min(1.0, (self._count - len(self._left) + begun) / max(self._count, 1))


class Reporter:
    """Shows the stages of a long work on a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._parts: Parts | None = None
        self._done = 0

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        """Show that a stage runs. The function that it yields is told of progress, in the unit of `total`."""
        begin, self._done = time.monotonic(), 0
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description:<28}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.console, transient=True) as bar:
                task = bar.add_task(title, total=total)

                def show(_: float) -> None:
                    bar.update(task, completed=round(self._share(total) * total))

                yield self._advance(show, SECONDS_BETWEEN_STEPS)
        else:

            def say(seconds: float) -> None:
                share = self._share(total)
                first = self._parts.first if self._parts else 0.0
                self.say(f"{title}: {percent(int(100 * share) / 100)}{_left(seconds, share, first)}")

            yield self._advance(say, SECONDS_BETWEEN_LINES)
        self.say(f"{title}: done in {time.monotonic() - begin:.1f} s")

    @contextmanager
    def parts(self, count: int, is_done: Callable[[int], bool]) -> Iterator[Callable[[], None]]:
        """Count the parts of a stage as progress, whoever does them. The function that it yields is told when one of
        this process has ended."""
        parts = self._parts = Parts(count, is_done)
        try:
            yield lambda: parts.end(self._done)
        finally:
            self._parts = None

    def _share(self, total: int) -> float:
        return self._parts.share(self._done, total) if self._parts else self._done / max(total, 1)

    def _advance(self, show: Callable[[float], None], every: float) -> Advance:
        """A function that is told of progress, and shows it every so many seconds, given those since the begin."""
        shown = begin = time.monotonic()

        def advance(amount: int) -> None:
            nonlocal shown
            self._done += amount
            if time.monotonic() - shown >= every:
                shown = time.monotonic()
                show(shown - begin)

        return advance


def _left(seconds: float, share: float, first: float) -> str:
    """How long the rest will take if it goes on like that; first: the share that was done when it began."""
    if not first < share < 1:
        return ""
    left = round(seconds * (1 - share) / (share - first))
    hours, minutes = left // 3600, left % 3600 // 60
    return f", about {hours} h {minutes} min left" if hours else f", about {minutes} min {left % 60} s left"


def advancing(documents: Iterator[Document], advance: Advance) -> Iterator[Document]:
    """The documents; `advance` is told of the bytes of each that is done."""
    for document in documents:
        yield document
        advance(document.text_bytes)
