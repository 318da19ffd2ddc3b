"""`megatfm train CONFIG [key=value …]`, and `megatfm train --from FOLDER_OR_RUN data.train=…`."""

import argparse
import logging

from megatfm.commands import add_config_arguments
from megatfm.config import load_config
from megatfm.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config and its overrides, or a model to go on from."""
    add_config_arguments(parser, optional=True)
    parser.add_argument(
        "--from",
        dest="source",
        metavar="MODEL",
        help="go on from a run, a checkpoint or a Hugging Face folder: its architecture, tokenizer and weights; all "
        "else from CONFIG, or from the model's own",
    )


def main(args: argparse.Namespace) -> int:
    """Train or resume; returns 0 when done, 75 when stopped by a signal after saving (`megatfm.errors`)."""
    given, overrides = args.config, args.overrides
    if args.source is None:
        if given is None:
            raise UsageError(
                "a config is missing: give a TOML file, a run directory, a preset or --from MODEL"
            )
        config = load_config(given, overrides)
    else:
        from megatfm.commands.go_on import config_from

        if given is not None and "=" in given:
            given, overrides = None, [given, *overrides]
        config, said = config_from(args.source, given, overrides)
        for line in said:
            logging.getLogger("megatfm").info("%s", line)
    # After the config: its mistakes shouldn't wait for torch.
    from megatfm.describe.description import flops_per_token
    from megatfm.train.loop import train

    return train(config, flops_per_token)
