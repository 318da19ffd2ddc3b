"""The console: a progress bar on a terminal, plain lines in a log."""

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import open_nofollow
from megatfm.tracking.run_directory import RunDirectory

log = logging.getLogger("megatfm")


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Progress lines on the console. When they have gone (`megatfm train … | head`), the run goes on without them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop writing to a closed screen; other errors are reported as `logging` does."""
        if not isinstance(sys.exception(), BrokenPipeError):
            super().handleError(record)
            return
        log.removeHandler(self)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())
        log.warning(
            "nobody reads the screen any more: the run goes on, and says in its log what it would say here"
        )


class RunLog:
    """While entered, this rank's messages go to logs/rank-K.log, those of rank 0 to the screen as well.

    The log file also receives the traceback of an exception, and every thread's stack when the process crashes.
    """

    def __init__(self, run: RunDirectory, steps: int) -> None:
        self._run, self._path = run, run.log
        self._has_console, self._steps = run.is_main, steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._began, self._steps_here = time.monotonic(), 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undone where the log can't be written
            self._to_file = logging.StreamHandler(stack.enter_context(self._open()))
            self._to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            handlers: list[logging.Handler] = [self._to_file]
            if self._has_console and self._console.is_terminal:
                handlers.append(
                    RichHandler(
                        console=self._console, show_path=False, show_level=False, log_time_format="%H:%M:%S"
                    )
                )
            elif self._has_console:
                to_screen = ConsoleHandler(sys.stdout)
                to_screen.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
                handlers.append(to_screen)
            for handler in handlers:
                log.addHandler(handler)
                stack.callback(handler.close)
                stack.callback(log.removeHandler, handler)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.INFO)
            crashes = stack.enter_context(self._open())
            faulthandler.enable(crashes)
            stack.callback(faulthandler.disable)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and kind is not None:
            # A usage error is one line; a stack would add nothing.
            stack = None if isinstance(error, UsageError) else (kind, error, traceback)
            record = log.makeRecord(log.name, logging.ERROR, "", 0, "%s", (error,), stack)
            self._to_file.handle(record)
        self._stack.close()

    def step(self, record: Mapping[str, Any], is_due: bool) -> None:
        """Show a step: in a line when one is due, on a terminal above the bar, which tells every step."""
        facts = (
            f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s{_utilization(record)}"
        )
        self._steps_here += 1
        if self._has_console and self._console.is_terminal:
            if self._progress is None:
                self._progress = self._stack.enter_context(self._bar(record["step"] - 1))
            self._progress.update(self._progress.task_ids[0], completed=record["step"], facts=facts)
        if is_due:
            log.info(
                "step %d  %s  lr %.2e  grad norm %.2f%s",
                record["step"],
                facts,
                record["lr"],
                record["grad_norm"],
                self._eta(record["step"]),
            )
            if by_source := record.get("loss_by_source"):
                losses = ", ".join(f"{name} {loss:.4f}" for name, loss in by_source.items())
                log.info("step %d  loss by source: %s", record["step"], losses)

    def _eta(self, step: int) -> str:
        """The time that the steps to come will take if they go as those since the start went; nothing at the end."""
        if step >= self._steps:
            return ""
        seconds = (time.monotonic() - self._began) / self._steps_here * (self._steps - step)
        return f"  {timedelta(seconds=round(seconds))} left"

    def _bar(self, completed: int) -> Progress:
        progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        progress.add_task("train", total=self._steps, completed=completed, facts="")
        return progress

    def _open(self) -> TextIO:
        """Open the log to append to it. Raises MegatfmError."""
        self._run.will_write(self._path)
        try:
            return open(self._path, "a", encoding="utf-8", opener=open_nofollow)
        except OSError as error:
            raise MegatfmError(f"can't write {self._path}: {error.strerror}") from error


def _utilization(record: Mapping[str, Any]) -> str:
    """Format MFU by both conventions; a CPU's is often below a percent."""
    if "mfu" not in record:
        return ""
    return f"  MFU {100 * record['mfu']:.3g} % ({100 * record['mfu_causal']:.3g} % causal)"
