"""Commands about runs: `megatfm status`, `logs`, `cancel`, `report` and `compare`."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatfm.config.section import check_path
from megatfm.config.sources import check_is_run
from megatfm.errors import UsageError
from megatfm.files import to_strict_json
from megatfm.launchers.logs import follow_logs, print_tails
from megatfm.launchers.run_jobs import cancel_job_id, cancel_run, find_active_evaluations
from megatfm.launchers.status import (
    RunStatus,
    get_run_state,
    get_run_status,
    is_run_dir,
    list_run_dirs,
    resolve_run_dir,
)
from megatfm.terminal import print_table

if TYPE_CHECKING:
    from rich.table import Table


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories (all under runs/)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def status_command(args: argparse.Namespace) -> int:
    """Print the status of runs: one in full, several as a table."""
    runs = [resolve_run_dir(path) for path in args.runs] or list_run_dirs()
    statuses = [get_run_status(run) for run in runs]
    if args.json:
        for status in statuses:
            print(to_strict_json(status.as_dict()))
    elif len(args.runs) == 1:
        print(_format_details(statuses[0]))
    else:
        print_table(_make_table(statuses))
    return 0


def _make_table(statuses: Iterable[RunStatus]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "loss", "tokens/s", "left", "restarts", ""):
        table.add_column(heading, justify="left" if heading in ("run", "state", "") else "right", no_wrap=bool(heading))
    for status in statuses:
        cells = (
            status.run.name,
            status.state.name,
            _format_step(status),
            _format_loss(status),
            _format_speed(status),
            _format_eta(status),
        )
        details = "; ".join(filter(None, (status.state.reason, status.work)))
        table.add_row(*cells, str(status.restarts or ""), details)
    return table


def _format_details(status: RunStatus) -> str:
    since = f", since {_format_time(status.state.since)}" if status.state.since else ""
    rows = {
        "run": str(status.run),
        "state": status.state.name + (f": {status.state.reason}" if status.state.reason else "") + since,
        "work": status.work,
        "step": _format_step(status),
        "loss": _format_loss(status),
        "tokens/s": _format_speed(status),
        "time left": _format_eta(status),
        "checkpoint": f"step {status.checkpoint}" if status.checkpoint else "none",
        "restarts": str(status.restarts),
        "last event": status.event,
    }
    return "\n".join(f"{name:<12}{text}" for name, text in rows.items() if text)


def _format_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as date and time; one that no calendar has stays a number."""
    try:
        return time.strftime("%d %b %H:%M", time.localtime(seconds))
    except (OSError, OverflowError, ValueError):
        return f"{seconds:g}"


def _format_step(status: RunStatus) -> str:
    return f"{status.step or 0:,} of {status.steps:,}" if status.steps else f"{status.step:,}" if status.step else ""


def _format_loss(status: RunStatus) -> str:
    return "" if status.loss is None else f"{status.loss:.4f}"


def _format_speed(status: RunStatus) -> str:
    return "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}"


def _format_eta(status: RunStatus) -> str:
    if status.seconds_left is None:
        return ""
    minutes, seconds = divmod(round(status.seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


QUEUE_SECONDS = 10.0
"""Seconds between two queries of the job queue: frequent queries slow a scheduler down for everyone."""


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/quickstart")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until run and evaluations end")
    parser.add_argument(
        "-n", "--lines", type=int, default=20, metavar="N", help="print the last N lines of each file (20)"
    )
    parser.add_argument(
        "--all", action="store_true", help="print the logs of all ranks, not only of rank 0 and those with errors"
    )


def logs_command(args: argparse.Namespace) -> int:
    """Print the logs that matter: the jobs' or rank 0's, and those of ranks with errors."""
    run = resolve_run_dir(args.run_dir)
    tails = print_tails(run, args.lines, args.all, include_unfinished=not args.follow)
    if not tails:
        print(f"{run}: no logs yet", flush=True)
    last_query, run_is_over = 0.0, False

    def is_over() -> bool:
        nonlocal last_query, run_is_over
        if time.monotonic() - last_query > QUEUE_SECONDS:
            run_is_over = get_run_state(run).is_over and not find_active_evaluations(run)
            last_query = time.monotonic()
        return run_is_over

    if args.follow:
        with contextlib.suppress(KeyboardInterrupt):  # the user ends following by Ctrl-C
            follow_logs(run, tails, args.all, is_over)
    return 0


def add_cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="a run directory, for example runs/quickstart, or a SLURM job's number"
    )
    parser.add_argument("--all", action="store_true", help="end all runs under runs/")


def cancel_command(args: argparse.Namespace) -> int:
    """End the jobs and processes that train or evaluate runs, and their queued jobs. A run saves first if it can."""
    if args.all == bool(args.runs):
        raise UsageError("name what to end: run directories or numbers of jobs, or --all for everything under runs/")
    if not args.all:
        for name in args.runs:
            print(
                cancel_job_id(name)
                if name.isdecimal() and not is_run_dir(Path(name))
                else cancel_run(resolve_run_dir(Path(name)))
            )
        return 0
    ended = 0
    for run in list_run_dirs():
        try:
            print(f"{run.name}: {cancel_run(run)}")
            ended += 1
        except UsageError as error:
            print(f"note: {error}", file=sys.stderr)
    if not ended:
        raise UsageError("no run under runs/ has a job or process to end")
    return 0


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, for example runs/quickstart")
    parser.add_argument(
        "--with",
        dest="others",
        nargs="+",
        default=[],
        metavar="RUN",
        help="runs whose curves are drawn behind this one's, for example runs/baseline",
    )
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="description of your devices, for the estimate beside the run"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (RUN/report.html)")


def report_command(args: argparse.Namespace) -> int:
    """Write a run's report and print where it is."""
    from megatfm.estimate.recorded import compare_with_estimate
    from megatfm.report import write_report

    folder = check_path(Path(args.run_dir))
    check_is_run(folder)
    try:
        estimated = compare_with_estimate(folder, args.hardware)
    except UsageError as error:
        if args.hardware:
            raise
        print(f"without an estimate: {error}", file=sys.stderr)
        estimated = []
    print(write_report(folder, args.others, estimated, args.out))
    return 0


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs, and the file for the page."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, for example runs/sweep-*")
    parser.add_argument("--out", default="compare.html", metavar="FILE", help="the page (compare.html)")


def compare_command(args: argparse.Namespace) -> int:
    """Print different settings and results of runs, and write a page with their curves."""
    from rich import box
    from rich.table import Table

    from megatfm.report.compare import RunComparison, write_comparison

    comparison = RunComparison.read([check_path(Path(run)) for run in args.runs])
    results = comparison.collect_results()
    table = Table("", *comparison.names, box=box.SIMPLE_HEAD, title_justify="left")
    for key, cells in comparison.list_differences():
        table.add_row(key, *cells)
    table.add_section()
    for index, column in enumerate(results.columns):
        table.add_row(column, *(row[index] for row in results.rows))
    print_table(table)
    for note in comparison.list_notes():
        print(f"note: {note}")
    print(write_comparison(comparison, args.out))
    return 0
