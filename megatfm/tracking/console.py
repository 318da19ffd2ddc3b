"""Console and log files of a run: a progress bar on a terminal, plain lines elsewhere."""

import contextlib
import faulthandler
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import IO, Any, Self, TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import open_nofollow
from megatfm.terminal import discard_output, is_closed_error
from megatfm.tracking.run_directory import RunDirectory

log = logging.getLogger("megatfm")

MAX_SHOWN_SECONDS = 1e10
"""Time left, some 300 years, above which none is shown: a run without an end, whose steps a person stops."""


class ConsoleHandler(logging.Handler):
    """A handler for the console. If that is closed (`megatfm train … | head`), the run continues without it; if it is a
    file on a full disk, without the lines that can't be written."""

    has_failed = False

    @property
    def output(self) -> IO[str]:
        """The stream to which it writes."""
        raise NotImplementedError

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop writing after the console was closed, and report a full disk once. Other errors are handled as `logging`
        does."""
        error = sys.exception()
        if is_closed_error(error):
            log.removeHandler(self)
            discard_output(self.output.fileno())
            log.warning("the console was closed: the run continues, and writes to its log file only")
        elif not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            log.warning("the console can't be written (%s): its lines are in the log file", error.strerror)

    def close(self) -> None:
        """Flush the console; what can't be written is lost."""
        try:
            self.output.flush()
        except OSError:
            discard_output(self.output.fileno())
        super().close()


class PlainHandler(ConsoleHandler, logging.StreamHandler[TextIO]):
    """Writes log lines to stdout as they are."""

    @property
    def output(self) -> IO[str]:
        return self.stream


class TerminalHandler(ConsoleHandler, RichHandler):
    """Writes log lines above the progress bar of a terminal."""

    @property
    def output(self) -> IO[str]:
        return self.console.file


class LogFileHandler(logging.StreamHandler[TextIO]):
    """Writes messages to the log file. If the disk is full, the run continues, and a line on stderr says so once."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a failed write once. Other errors are handled as `logging` does."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            with contextlib.suppress(OSError):
                print(f"warning: {self.stream.name}: can't be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        with contextlib.suppress(OSError):
            self.stream.close()
        super().close()


class RunLog:
    """Context manager that writes this rank's messages to logs/rank-K.log, and rank 0's also to the console.

    The log file also receives the traceback of an exception, and every thread's stack if the process crashes.
    """

    def __init__(self, run: RunDirectory, steps: int) -> None:
        self._run, self._path = run, run.log_path
        self._has_console, self._steps = run.is_main, steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._start_time, self._n_steps_done = 0.0, -1

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undoes everything if a log file can't be opened
            self._file_handler = LogFileHandler(self._open())
            self._file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            handlers: list[logging.Handler] = [self._file_handler]
            if self._has_console and self._console.is_terminal:
                handlers.append(
                    TerminalHandler(
                        console=self._console, show_path=False, show_level=False, log_time_format="%H:%M:%S"
                    )
                )
            elif self._has_console:
                console_handler = PlainHandler(sys.stdout)
                console_handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
                handlers.append(console_handler)
            for handler in handlers:
                log.addHandler(handler)
                stack.callback(handler.close)
                stack.callback(log.removeHandler, handler)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.INFO)
            # Its file can't be asked for; stderr is the one of `python -X faulthandler`.
            restore = partial(faulthandler.enable, 2) if faulthandler.is_enabled() else faulthandler.disable
            faulthandler.enable(stack.enter_context(self._open()))
            stack.callback(restore)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and kind is not None:
            # A usage error explains itself: it needs no traceback.
            exc_info = None if isinstance(error, UsageError) else (kind, error, traceback)
            record = log.makeRecord(log.name, logging.ERROR, "", 0, "%s", (error,), exc_info)
            self._file_handler.handle(record)
        self._stack.close()

    def step(self, record: Mapping[str, Any], is_due: bool) -> None:
        """Show a step's metrics: as a log line if one is due, and on a terminal in the progress bar."""
        metrics = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s{_format_mfu(record)}"
        self._n_steps_done += 1
        if self._n_steps_done == 0:  # the time left leaves out the start and the first step, which compiles
            self._start_time = time.monotonic()
        if self._has_console and self._console.is_terminal:
            if self._progress is None:
                self._progress = self._stack.enter_context(self._make_progress_bar(record["step"] - 1))
            self._progress.update(self._progress.task_ids[0], completed=record["step"], metrics=metrics)
        if is_due:
            log.info(
                "step %d  %s  lr %.2e  grad norm %.2f%s",
                record["step"],
                metrics,
                record["lr"],
                record["grad_norm"],
                self._format_eta(record["step"]),
            )
            if by_source := record.get("loss_by_source"):
                losses = ", ".join(f"{name} {loss:.4f}" for name, loss in by_source.items())
                log.info("step %d  loss by source: %s", record["step"], losses)

    def _format_eta(self, step: int) -> str:
        """Format the time left, from the average duration of steps after the first; empty at the first and last."""
        if step >= self._steps or not self._n_steps_done:
            return ""
        seconds = (time.monotonic() - self._start_time) / self._n_steps_done * (self._steps - step)
        return f"  {timedelta(seconds=round(seconds))} left" if seconds < MAX_SHOWN_SECONDS else ""

    def _make_progress_bar(self, completed: int) -> Progress:
        progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        progress.add_task("train", total=self._steps, completed=completed, metrics="")
        return progress

    def _open(self) -> TextIO:
        """Open the log file for appending. Raises MegatfmError."""
        self._run.will_write(self._path)
        try:
            return open(self._path, "a", encoding="utf-8", opener=open_nofollow)
        except OSError as error:
            raise MegatfmError(f"can't write {self._path}: {error.strerror}") from error


def _format_mfu(record: Mapping[str, Any]) -> str:
    """Format MFU, with all of attention and, where it differs, with its causal half only. A CPU's is often small."""
    if "mfu" not in record:
        return ""
    full, causal = (f"{100 * record[key]:#.3g} %" for key in ("mfu", "mfu_causal"))
    return f"  MFU {full}" + f" ({causal} causal)" * (causal != full)
