"""`megatfm config`: prints configs, presets and schemas."""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from megatfm.commands.arguments import add_config_and_overrides
from megatfm.config import Config, find_config, list_presets, load_config, to_toml
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.config.prep import PrepConfig
from megatfm.config.section import Section
from megatfm.config.sources import read_files
from megatfm.errors import UsageError
from megatfm.terminal import wrap_line


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    show = actions.add_parser("show", help="print a config with all its defaults and overrides")
    add_config_and_overrides(show)
    show.add_argument(
        "--deepspeed", action="store_true", help="print the JSON that DeepSpeed is configured with instead"
    )
    presets = actions.add_parser("presets", help="list the configs that ship with megatfm")
    presets.add_argument("words", nargs="*", metavar="WORD", help="only those that mention all words, such as moe")
    schema = actions.add_parser("schema", help="print the JSON schema, for editors")
    schema.add_argument("--prep", action="store_true", help="the schema of `megatfm prep`'s config")


def config_command(args: argparse.Namespace) -> int:
    """Print the config, the schema or the presets."""
    if args.action == "presets":
        print_presets(args.words)
        return 0
    if args.action == "schema":
        print(json.dumps(make_schema(PrepConfig if args.prep else Config), indent=2))
        return 0
    config = load_config(args.config, args.overrides)
    if args.deepspeed:
        if config.parallel.engine != "deepspeed":
            raise UsageError(
                f"parallel.engine = {config.parallel.engine!r} doesn't use DeepSpeed: give parallel.engine=deepspeed "
                "to see its config"
            )
        print(json.dumps(make_deepspeed_json(config, config.train.precision), indent=2))
    else:
        print(f"# {_describe_sources(args.config, args.overrides)}\n{to_toml(config)}", end="")
    return 0


def make_schema(config_class: type[Section]) -> dict[str, Any]:
    """Return the JSON schema of a config file. A file with `extends` has no required keys."""
    schema = config_class.model_json_schema()
    partial = _drop_required(json.loads(json.dumps(schema).replace('"#/$defs/', '"#/$defs/partial ')))
    sections = {f"partial {name}": section for name, section in partial["$defs"].items()}
    partial["$defs"] = sections | schema.pop("$defs")
    partial["properties"]["extends"] = {
        "type": "string",
        "minLength": 1,
        "description": "The config that this one extends: a preset's name, or a path relative to this file.",
    }
    partial["properties"]["without"] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Keys of the extended config that are removed, so that their defaults apply.",
    }
    del schema["additionalProperties"]
    return partial | {"if": {"not": {"required": ["extends"]}}, "then": schema}


def _drop_required(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_drop_required(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _drop_required(item) for key, item in schema.items() if not (key == "required" and isinstance(item, list))
    }


def _describe_sources(path_or_preset: str, overrides: Sequence[str]) -> str:
    """Return a line of comment with the files and overrides from which a config is made."""
    files = ", which extends ".join(file.label for file in read_files(Config, path_or_preset))
    line = f"{files}{f'; then {shlex.join(overrides)}' if overrides else ''}"
    return "".join(char if char.isprintable() else " " for char in line)  # TOML forbids others in comments


def print_presets(words: Sequence[str] = ()) -> None:
    """Print name and description of the presets that mention all words, a line each where that is no terminal."""
    names = list_presets()
    indent = max(map(len, names)) + 2
    lines = {name: f"{name:<{indent}}{_describe_preset(name)}" for name in names}
    chosen = [line for line in lines.values() if all(word.lower() in line.lower() for word in words)]
    if not chosen:
        raise UsageError(f"no preset mentions {' and '.join(words)}: `megatfm config presets` lists all {len(names)}")
    for line in chosen:
        print(wrap_line(line, indent))


def _describe_preset(preset: str) -> str:
    """Return the first sentence of the comment at the head of a preset."""
    text = find_config(preset)[0].read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in text.partition("\n#\n")[0].splitlines() if line.startswith("#"))
    return re.split(r"(?<!\bet al)\. ", comment)[0].rstrip(".") + "."
