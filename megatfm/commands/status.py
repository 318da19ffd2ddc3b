"""`megatfm status [RUN …]`."""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatfm.launchers.progress import Progress, check_run, look, runs_here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories (all under runs/)")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, for programs")


def main(args: argparse.Namespace) -> int:
    """Print how runs are: one in full, several in a table."""
    runs = [check_run(path) for path in args.runs] or runs_here()
    found = [look(run) for run in runs]
    if args.json:
        for each in found:
            print(json.dumps(each.plain()))
    elif len(args.runs) == 1:
        print(_in_full(found[0]))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200
        console.print(_together(found))
    return 0


def _together(found: Iterable[Progress]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "loss", "tokens/s", "left", "restarts", ""):
        table.add_column(
            heading, justify="left" if heading in ("run", "state", "") else "right", no_wrap=bool(heading)
        )
    for each in found:
        facts = (each.run.name, each.state.word, _step(each), _loss(each), _speed(each), _left(each))
        details = "; ".join(filter(None, (each.state.detail, each.work)))
        table.add_row(*facts, str(each.restarts or ""), details)
    return table


def _in_full(each: Progress) -> str:
    since = (
        f", since {time.strftime('%d %b %H:%M', time.localtime(each.state.since))}"
        if each.state.since
        else ""
    )
    rows = {
        "run": str(each.run),
        "state": each.state.word + (f": {each.state.detail}" if each.state.detail else "") + since,
        "work": each.work,
        "step": _step(each),
        "loss": _loss(each),
        "tokens/s": _speed(each),
        "time left": _left(each),
        "checkpoint": f"step {each.checkpoint}" if each.checkpoint else "none",
        "restarts": str(each.restarts),
        "last event": each.event,
    }
    return "\n".join(f"{name:<12}{text}" for name, text in rows.items() if text)


def _step(each: Progress) -> str:
    return f"{each.step or 0:,} of {each.steps:,}" if each.steps else f"{each.step:,}" if each.step else ""


def _loss(each: Progress) -> str:
    return "" if each.loss is None else f"{each.loss:.4f}"


def _speed(each: Progress) -> str:
    return "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}"


def _left(each: Progress) -> str:
    if each.seconds_left is None:
        return ""
    minutes, seconds = divmod(round(each.seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
