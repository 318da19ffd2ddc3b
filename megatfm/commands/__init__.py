"""The commands that are too small for a room of their own: a module each, with `add_arguments` and `main`."""

import argparse
import logging

from megatfm.config import Config, load_config
from megatfm.errors import UsageError


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


def add_source_argument(parser: argparse.ArgumentParser) -> None:
    """`--from`, beside a config that may then be left out."""
    parser.add_argument(
        "--from",
        dest="source",
        metavar="MODEL",
        help="go on from a run, a checkpoint or a Hugging Face folder: its architecture, tokenizer and weights; all "
        "else from CONFIG, or from the model's own",
    )


def training_config(load_training_config: argparse.Namespace) -> Config:
    """The config of a run, which may go on from a model. Raises UsageError."""
    given, overrides = load_training_config.config, load_training_config.overrides
    if load_training_config.source is None:
        if given is None:
            raise UsageError(
                "a config is missing: give a TOML file, a run directory, a preset or --from MODEL"
            )
        return load_config(given, overrides)
    from megatfm.commands.go_on import continue_from_config  # imports torch

    if given is not None and "=" in given:
        given, overrides = None, [given, *overrides]
    config, said = continue_from_config(load_training_config.source, given, overrides)
    for line in said:
        logging.getLogger("megatfm").info("%s", line)
    return config
