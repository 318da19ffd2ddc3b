"""`megatfm logs RUN [-f]`."""

import argparse
import contextlib
import time
from pathlib import Path

from megatfm.launchers.follow import follow_logs, print_tails
from megatfm.launchers.progress import launcher_of, resolve_run_dir

QUEUE_SECONDS = 10.0
"""How often the queue is asked whether there will be more: schedulers don't like to be asked often."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/quickstart"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what is written, until it ends"
    )
    parser.add_argument(
        "-n", "--lines", type=int, default=20, metavar="N", help="last lines of each file (20)"
    )
    parser.add_argument("--all", action="store_true", help="all ranks, not only those with trouble")


def main(args: argparse.Namespace) -> int:
    """Print the logs that matter: the job's or rank 0's, those of ranks with trouble."""
    run = resolve_run_dir(args.run_dir)
    tails = print_tails(run, args.lines, args.all, to_the_end=not args.follow)
    if not tails and not args.follow:
        print(f"{run}: no logs yet")
    launcher, asked, over = launcher_of(run), 0.0, False

    def is_over() -> bool:
        nonlocal asked, over
        if launcher and time.monotonic() - asked > QUEUE_SECONDS:
            asked, over = time.monotonic(), launcher.status(run).is_over
        return over

    if args.follow:
        with contextlib.suppress(KeyboardInterrupt):  # how one leaves
            follow_logs(run, tails, args.all, is_over)
    return 0
