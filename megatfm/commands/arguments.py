"""Arguments that several commands take: a config and its overrides, a model to start from, trust in plugins."""

import argparse
from pathlib import Path

from megatfm.config import Config
from megatfm.registry import import_foreign_plugins


def add_config_and_overrides(
    parser: argparse.ArgumentParser, example: str = "train.steps=100", *, optional: bool = False
) -> None:
    """Add CONFIG and its overrides."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?" if optional else None,
        help="a TOML file, a run directory, or the name of a preset",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"for example {example}")


def add_source_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--from`, with which a config may be left out."""
    parser.add_argument(
        "--from",
        dest="source",
        metavar="MODEL",
        help="go on from a run, a checkpoint or a Hugging Face folder: its architecture, tokenizer and weights; all "
        "else from CONFIG, or from the model's own",
    )


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-plugins`: packages that a run names are imported only if the user asks for it."""
    parser.add_argument(
        "--trust-plugins",
        action="store_true",
        help="import the packages that the run's config names in plugins: code of whoever made it",
    )


def check_trust(config: Config, args: argparse.Namespace) -> None:
    """Import the plugins of a run's config, if they are trusted or named in an override.

    A config file on its own is the user's, who has written what it names. Raises UsageError.
    """
    path = Path(args.config)
    is_run = path.is_dir() or (path.name == "config.toml" and (path.parent / "checkpoints").is_dir())
    is_named = any(override.partition("=")[0].strip() == "plugins" for override in args.overrides)
    if is_run and not is_named:
        import_foreign_plugins(config.plugins, args.config, trusted=args.trust_plugins)
