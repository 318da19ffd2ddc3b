"""`megatfm config show CONFIG [key=value …] [--deepspeed]`, `config schema [--prep]` and `config presets`."""

import argparse
import json

from megatfm.commands import add_config_arguments
from megatfm.config import Config, find_config, load_config, preset_names, to_toml
from megatfm.config.deepspeed_json import derive
from megatfm.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    show = actions.add_parser("show", help="print a config with all its defaults and overrides")
    add_config_arguments(show)
    show.add_argument(
        "--deepspeed", action="store_true", help="print the JSON that DeepSpeed is configured with instead"
    )
    actions.add_parser("presets", help="list the configs that ship with megatfm, and what each is")
    schema = actions.add_parser("schema", help="print the JSON schema, for editors")
    schema.add_argument("--prep", action="store_true", help="of `megatfm prep`'s config")


def main(args: argparse.Namespace) -> int:
    """Print the config, the schema or the presets."""
    from megatfm.config.prep import PrepConfig

    if args.action == "presets":
        for name in preset_names():
            print(f"{name:<20} {_about(name)}")
        return 0
    if args.action == "schema":
        print(json.dumps((PrepConfig if args.prep else Config).model_json_schema(), indent=2))
        return 0
    config = load_config(args.config, args.overrides)
    if args.deepspeed:
        if config.parallel.engine != "deepspeed":
            raise UsageError(
                f"parallel.engine = {config.parallel.engine!r}: DeepSpeed has no part in it; give "
                "parallel.engine=deepspeed to see what its config would be"
            )
        print(json.dumps(derive(config, config.train.precision), indent=2))
    else:
        print(to_toml(config), end="")
    return 0


def _about(preset: str) -> str:
    """The first sentence of the comment at the head of a preset."""
    text = find_config(preset)[0].read_text(encoding="utf-8")
    words = " ".join(
        line.lstrip("# ") for line in text.partition("\n#\n")[0].splitlines() if line.startswith("#")
    )
    return words.partition(". ")[0].rstrip(".") + "."
