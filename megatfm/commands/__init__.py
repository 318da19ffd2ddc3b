"""The commands that are too small for a room of their own: a module each, with `add_arguments` and `main`."""

import argparse


def add_config_arguments(
    parser: argparse.ArgumentParser, example: str = "train.steps=100", *, optional: bool = False
) -> None:
    """CONFIG and its overrides."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?" if optional else None,
        help="a TOML file, a run directory, or the name of a preset",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"for example {example}")
