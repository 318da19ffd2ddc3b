"""`megatfm describe CONFIG`: parts, exact parameter counts, FLOPs and state, before anything is allocated."""

import argparse

from megatfm.commands import trust
from megatfm.config import load_config
from megatfm.describe import describe, to_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a TOML file, a run directory, or the name of a preset"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model.n_layers=8")
    trust.add_argument(parser)


def main(args: argparse.Namespace) -> int:
    """Print the description."""
    config = load_config(args.config, args.overrides)
    trust.check(config, args)
    for label, text in to_lines(describe(config)):
        print(f"{label:<16}  {text}".rstrip())
    return 0
