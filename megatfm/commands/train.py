"""`megatfm train CONFIG [key=value …]`."""

import argparse

from megatfm.commands import add_config_arguments as add_arguments
from megatfm.config import load_config

__all__ = ["add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Train or resume; returns 0 when done, 75 when stopped by a signal after saving (`megatfm.errors`)."""
    config = load_config(args.config, args.overrides)
    from megatfm.train.loop import train  # after the config: its mistakes shouldn't wait for torch

    return train(config)
