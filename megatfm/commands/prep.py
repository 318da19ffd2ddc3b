"""`megatfm prep CONFIG [key=value …]`."""

import argparse

from data_prep.command import cli
from megatfm.commands import add_config_arguments as add_arguments

__all__ = ["add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Prepare a corpus; the same as `python -m data_prep`."""
    return cli([args.config, *args.overrides, *(["--debug"] if args.debug else [])])
