"""`megatfm prep CONFIG [key=value …]`."""

import argparse

from data_prep.command import cli
from megatfm.commands import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, example="read.folder=my-texts")


def main(args: argparse.Namespace) -> int:
    """Prepare a corpus; the same as `python -m data_prep`."""
    return cli([args.config, *args.overrides, *(["--debug"] if args.debug else [])])
