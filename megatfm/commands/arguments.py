"""Arguments that several commands share: a config and its overrides, a model to start from, trust in plugins."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatfm.config import Config
from megatfm.config.load import get_overridden_keys
from megatfm.registry import import_foreign_plugins


def add_config_and_overrides(
    parser: argparse.ArgumentParser,
    example: str = "train.steps=100",
    *,
    optional: bool = False,
    sources: str = "a TOML file, a run directory, or the name of a preset",
) -> None:
    """Add CONFIG and its overrides.

    example: an override for the help text. optional: whether CONFIG may be omitted. sources: what CONFIG may be.
    """
    parser.add_argument("config", metavar="CONFIG", nargs="?" if optional else None, help=sources)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"for example {example}")


def split_config(config: str | None, overrides: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return config and overrides, where the first argument may be an override because CONFIG was omitted."""
    if config is not None and "=" in config:
        return None, [config, *overrides]
    return config, overrides


def add_source_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--from`, a model to start from."""
    parser.add_argument(
        "--from",
        dest="source",
        metavar="MODEL",
        help="start from the architecture, tokenizer and weights of a run, checkpoint or Hugging Face folder; other "
        "settings come from CONFIG, or without it from the model's own config",
    )


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-plugins`, without which the packages that a run's config names are not imported."""
    parser.add_argument(
        "--trust-plugins",
        action="store_true",
        help="import the packages that the run's config names in plugins, which runs their code",
    )


def check_trust(config: Config, args: argparse.Namespace) -> None:
    """Import the plugins of a run directory's config, if they are trusted. Raises UsageError if they are not.

    Plugins in a config file outside a run directory, or in an override, are the user's own, and need no check.
    """
    path = Path(args.config)
    is_run = path.is_dir() or (path.name == "config.toml" and (path.parent / "checkpoints").is_dir())
    if is_run and "plugins" not in get_overridden_keys(args.overrides):
        import_foreign_plugins(config.plugins, args.config, trusted=args.trust_plugins)
