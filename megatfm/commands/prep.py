"""`megatfm prep CONFIG [--part I/N] [key=value …]`."""

import argparse

from megatfm.commands import add_config_arguments
from megatfm.data_prep.command import DASK_HELP, PART_HELP, cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, example="read.folder=my-texts")
    parser.add_argument("--part", metavar="I/N", help=PART_HELP)
    parser.add_argument("--dask", metavar="SCHEDULER", help=DASK_HELP)


def main(args: argparse.Namespace) -> int:
    """Prepare a corpus; the same as `python -m megatfm.data_prep`."""
    part = ["--part", args.part] if args.part else []
    part += ["--dask", args.dask] if args.dask else []
    return cli([args.config, *args.overrides, *part, *(["--debug"] if args.debug else [])])
