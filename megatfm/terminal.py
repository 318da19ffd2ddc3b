"""A terminal: characters that its encoding lacks, streams that are closed, its end, and tables that are too wide.

Also counts with their noun, as `1 layer` and `2 layers`, the first of many names, the progress of long tasks, and log
lines that appear once a process.
"""

import codecs
import errno
import io
import logging
import os
import select
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import StyleType
    from rich.table import Table

log = logging.getLogger("megatfm")
T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0
"""Seconds between two lines of a `ProgressLog`."""
SPELLINGS = {
    "→": "->", "←": "<-", "×": "x", "·": "*", "•": "*", "–": "-", "—": "-", "−": "-", "…": "...", "≤": "<=", "≥": ">=",
    "≠": "!=", "≈": "~", "±": "+-", "²": "2", "₀": "0", "₁": "1", "‘": "'", "’": "'", "“": '"', "”": '"',
    "α": "alpha", "β": "beta", "μ": "mu", "µ": "u", "σ": "sigma", "Σ": "sum",
}  # fmt: skip
"""Characters in megatfm's messages → ASCII replacement. Other characters become a question mark."""

ERROR_HANDLER = "megatfm.spelled"


def open_closed_streams() -> None:
    """Open the null device in place of stdin, stdout and stderr if they are closed, as in `megatfm … >&-`.

    Otherwise the next file would get the number of a closed stream, and messages would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is that of the stream.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def list_hangup_signals() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, which a process gets when its terminal closes, or nothing if it ignores it, as `nohup` has it."""
    return () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)


def is_closed_error(error: BaseException | None) -> bool:
    """Return whether a write failed because the pipe's reader has ended, or the terminal was closed."""
    return isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO)


def mute_closed_streams() -> None:
    """Write stdout and stderr to the null device if the pipe's reader has ended, or the terminal was closed."""
    for stream in (1, 2):
        output = select.poll()
        output.register(stream, 0)
        if any(event & select.POLLERR for _, event in output.poll(0)):
            discard_output(stream)


def discard_output(stream: int) -> None:
    """Write a stream (its number) to the null device from now on, with what is still in its buffer: Python would try
    again to write that when it ends, and change the exit code where it fails."""
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), stream)


def print_to_stderr(line: str) -> None:
    """Print a line to stderr. If that can't be written, as on a full disk, the line is lost, and so are later ones."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr.fileno())


def spell_unencodable() -> None:
    """Make stdout and stderr replace characters that their encoding lacks, instead of raising UnicodeEncodeError.

    Bytes of file names that can't be decoded in this locale are written unchanged.
    """
    codecs.register_error(ERROR_HANDLER, _spell_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERROR_HANDLER)


def _spell_unencodable(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unencodable = error.object[error.start : error.end]
    return b"".join(map(_spell_character, unencodable)), error.end


def _spell_character(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # a byte of a file name (os.fsdecode)
        return bytes([ord(character) - 0xDC00])
    return SPELLINGS.get(character, "?").encode("ascii")


def make_table(headings: Iterable[str], left: Container[str], title: str, **options: Any) -> "Table":
    """Return a table without rows. left: headings of left-aligned columns; others are numbers. options: of `Table`."""
    from rich.table import Table

    table = Table(title=title, **options)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def print_table(table: "Table", console: "Console | None" = None) -> None:
    """Print a table; if it is wider than the terminal (or COLUMNS), as a list of rows, so that no cell is truncated."""
    if console is None:
        from rich.console import Console

        console = Console(highlight=False, markup=False)
    width = table.__rich_measure__(console, console.options.update(max_width=10**6)).maximum
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(width, console.width)
    if width <= console.width:
        console.print(table)
        return

    def show(text: str, style: "StyleType | None" = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    if table.title:
        show(str(table.title))
    headings = [str(column.header) for column in table.columns]
    for row, cells in zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True):
        first, *more_cells = map(str, cells)
        show(f"{headings[0]}: {first}" if headings[0] else first, row.style)
        for heading, text in zip(headings[1:], more_cells, strict=True):
            if text:
                show(f"  {heading}: {text}" if heading else f"  {text}", row.style)


def format_counted(count: int, singular: str, plural: str = "") -> str:
    """Return a count and its noun: "1 layer", "12,000 layers". plural: `singular` with an s by default."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def join_first(names: Sequence[str], limit: int) -> str:
    """Join the first `limit` names with commas, and append how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


_LOGGED: set[str] = set()
_is_muted = False


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message, unless this process has logged the same one before, or `mute_log_once` is entered."""
    if message not in _LOGGED and not _is_muted:
        _LOGGED.add(message)
        log.log(level, message)


@contextmanager
def mute_log_once() -> Iterator[None]:
    """Drop such messages, as of tensors that have shapes alone, and are on another device than a run's."""
    global _is_muted
    was_muted, _is_muted = _is_muted, True
    try:
        yield
    finally:
        _is_muted = was_muted


class ProgressLog:
    """Logs every ten seconds how much of a task is done, as `validation: 30 % of 1,200 rows`."""

    def __init__(self, task: str, total: int, unit: str) -> None:
        self._task, self._total, self._unit = task, total, unit
        self._done, self._last_line = 0, time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count further units as done."""
        self._done += count
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            percent = min(100, 100 * self._done // max(1, self._total))
            log.info("%s: %d %% of %s", self._task, percent, format_counted(self._total, self._unit))


def log_progress(items: Sequence[T], task: str, unit: str) -> Iterator[T]:
    """Yield items, and log how many are done (`ProgressLog`)."""
    progress = ProgressLog(task, len(items), unit)
    for item in items:
        yield item
        progress.advance()


def format_file_size(count: float) -> str:
    """Format the bytes of a file or of text: 3.21 MB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= 0.9995 * limit:  # rounded to three digits, at least 1
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def wrap_line(line: str, indent: int) -> str:
    """Return a line broken at the terminal's width, further lines indented; whole where the output is no terminal."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return line
    width = max(shutil.get_terminal_size().columns, 2 * indent)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
