"""`megatfm train CONFIG [key=value …]`, and `megatfm train --from FOLDER_OR_RUN data.train=…`."""

import argparse

from megatfm.commands import add_config_arguments, add_source_argument, training_config
from megatfm.parallel import sentinel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config and its overrides, or a model to go on from."""
    add_config_arguments(parser, optional=True)
    add_source_argument(parser)


def main(args: argparse.Namespace) -> int:
    """Train or resume; returns 0 when done, 75 when stopped by a signal after saving (`megatfm.errors`)."""
    sentinel.start()
    config = training_config(args)
    # After the config: its mistakes shouldn't wait for torch.
    from megatfm.describe.description import flops_per_token
    from megatfm.train.loop import train

    return train(config, flops_per_token)
