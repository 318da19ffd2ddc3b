"""`megatfm status [RUN …]`."""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatfm.launchers.progress import RunStatus, list_run_dirs, resolve_run_dir, run_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories (all under runs/)")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, for programs")


def main(args: argparse.Namespace) -> int:
    """Print how runs are: one in full, several in a table."""
    runs = [resolve_run_dir(path) for path in args.runs] or list_run_dirs()
    found = [run_status(run) for run in runs]
    if args.json:
        for progress in found:
            print(json.dumps(progress.as_dict()))
    elif len(args.runs) == 1:
        print(_details(found[0]))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200
        console.print(_table(found))
    return 0


def _table(found: Iterable[RunStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "loss", "tokens/s", "left", "restarts", ""):
        table.add_column(
            heading, justify="left" if heading in ("run", "state", "") else "right", no_wrap=bool(heading)
        )
    for progress in found:
        facts = (
            progress.run.name,
            progress.state.name,
            _step(progress),
            _loss(progress),
            _speed(progress),
            _format_eta(progress),
        )
        details = "; ".join(filter(None, (progress.state.reason, progress.work)))
        table.add_row(*facts, str(progress.restarts or ""), details)
    return table


def _details(progress: RunStatus) -> str:
    since = (
        f", since {time.strftime('%d %b %H:%M', time.localtime(progress.state.since))}"
        if progress.state.since
        else ""
    )
    rows = {
        "run": str(progress.run),
        "state": progress.state.name
        + (f": {progress.state.reason}" if progress.state.reason else "")
        + since,
        "work": progress.work,
        "step": _step(progress),
        "loss": _loss(progress),
        "tokens/s": _speed(progress),
        "time left": _format_eta(progress),
        "checkpoint": f"step {progress.checkpoint}" if progress.checkpoint else "none",
        "restarts": str(progress.restarts),
        "last event": progress.event,
    }
    return "\n".join(f"{name:<12}{text}" for name, text in rows.items() if text)


def _step(progress: RunStatus) -> str:
    return (
        f"{progress.step or 0:,} of {progress.steps:,}"
        if progress.steps
        else f"{progress.step:,}"
        if progress.step
        else ""
    )


def _loss(progress: RunStatus) -> str:
    return "" if progress.loss is None else f"{progress.loss:.4f}"


def _speed(progress: RunStatus) -> str:
    return "" if progress.tokens_per_second is None else f"{progress.tokens_per_second:,.0f}"


def _format_eta(progress: RunStatus) -> str:
    if progress.seconds_left is None:
        return ""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
