"""`megatfm config show CONFIG [key=value …]` and `megatfm config schema [--prep]`."""

import argparse
import json

from megatfm.commands import add_config_arguments
from megatfm.config import Config, load_config, to_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    add_config_arguments(
        actions.add_parser("show", help="print a config with all its defaults and overrides")
    )
    schema = actions.add_parser("schema", help="print the JSON schema, for editors")
    schema.add_argument("--prep", action="store_true", help="of `megatfm prep`'s config")


def main(args: argparse.Namespace) -> int:
    """Print the config or the schema."""
    from megatfm.config.prep import PrepConfig

    if args.action == "schema":
        print(json.dumps((PrepConfig if args.prep else Config).model_json_schema(), indent=2))
    else:
        print(to_toml(load_config(args.config, args.overrides)), end="")
    return 0
