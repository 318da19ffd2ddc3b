"""`megatfm cancel RUN|JOB … | --all`."""

import argparse
import sys
from pathlib import Path

from megatfm.errors import UsageError
from megatfm.launchers.beside import cancel, cancel_job_id
from megatfm.launchers.progress import is_run_dir, list_run_dirs, resolve_run_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run directory, for example runs/quickstart, or a SLURM job's number",
    )
    parser.add_argument("--all", action="store_true", help="everything of all runs under runs/ here")


def main(args: argparse.Namespace) -> int:
    """End what trains or evaluates runs, and what waits to go on with them. A run saves first, if time is left."""
    if args.all == bool(args.runs):
        raise UsageError(
            "say what to end: run directories or numbers of jobs, or --all for everything under runs/"
        )
    if not args.all:
        for name in args.runs:
            print(
                cancel_job_id(name)
                if name.isdecimal() and not is_run_dir(Path(name))
                else cancel(resolve_run_dir(Path(name)))
            )
        return 0
    ended = 0
    for run in list_run_dirs():
        try:
            print(f"{run.name}: {cancel(run)}")
            ended += 1
        except UsageError as error:
            print(f"note: {error}", file=sys.stderr)
    if not ended:
        raise UsageError("nothing of the runs under runs/ here waits or runs")
    return 0
