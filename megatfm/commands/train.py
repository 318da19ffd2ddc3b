"""`megatfm train CONFIG [key=value …]`, and `megatfm train --from FOLDER_OR_RUN data.train=…`."""

import argparse
import os
from collections.abc import MutableMapping

from megatfm.commands import add_config_arguments, add_source_argument, training_config
from megatfm.parallel import sentinel

ALLOCATOR_VARS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Names of the same setting: that of today, and older ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config and its overrides, or a model to go on from."""
    add_config_arguments(parser, optional=True)
    add_source_argument(parser)


def enable_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Have torch's allocator on GPUs grow its segments, so that less of the memory is lost between blocks of changing
    sizes; unless something is set. To be called before torch is loaded."""
    if not ALLOCATOR_VARS.intersection(environment):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def main(args: argparse.Namespace) -> int:
    """Train or resume; returns 0 when done, 75 when stopped by a signal after saving (`megatfm.errors`)."""
    enable_expandable_segments(os.environ)
    sentinel.start()
    config = training_config(args)
    # After the config: its mistakes shouldn't wait for torch.
    from megatfm.describe.description import flops_per_token
    from megatfm.train.loop import train

    return train(config, flops_per_token)
