"""The option `--trust-plugins`: packages that somebody's run names are imported only if the user asks for it."""

import argparse
from pathlib import Path

from megatfm.config import Config
from megatfm.registry import import_foreign_plugins


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-plugins`."""
    parser.add_argument(
        "--trust-plugins",
        action="store_true",
        help="import the packages that the run's config names in plugins: code of whoever made it",
    )


def check(config: Config, args: argparse.Namespace) -> None:
    """Import the plugins of a run's config, if they are trusted or named in an override.

    A config file on its own is the user's, who has written what it names. Raises UsageError.
    """
    path = Path(args.config)
    is_run = path.is_dir() or (path.name == "config.toml" and (path.parent / "checkpoints").is_dir())
    is_named = any(override.partition("=")[0].strip() == "plugins" for override in args.overrides)
    if is_run and not is_named:
        import_foreign_plugins(config.plugins, args.config, trusted=args.trust_plugins)
