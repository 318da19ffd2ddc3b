"""`megatfm cancel RUN`."""

import argparse
from pathlib import Path

from launchers.progress import check_run, launcher_of
from megatfm.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="a run directory, for example runs/quickstart"
    )


def main(args: argparse.Namespace) -> int:
    """End what trains a run, and what waits to go on with it. The run saves before it stops, if time is left."""
    run = check_run(args.run_dir)
    launcher = launcher_of(run)
    if launcher is None:
        raise UsageError(
            f"{run}: was not started by `megatfm launch`: stop its process by SIGTERM, and it saves"
        )
    print(launcher.cancel(run))
    return 0
