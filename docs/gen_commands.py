"""MkDocs hook: the command reference, made from the command line's own parser whenever the docs are built."""

import argparse
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from megatfm.cli import build_parser

INTRODUCTION = (
    "`CONFIG` is a TOML file, the name of a preset, or, but for `prep`, a run directory; `key=value` sets any of its "
    "keys, anywhere on the line. Every command takes `--help`, and `--debug`, which shows the traceback of an "
    "error that is otherwise one line. [Exit codes](../guide/troubleshooting.md#exit-codes) are the same for all."
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page."""
    files.remove(files.src_uris["reference/commands.md"])  # what stands there in the repository
    files.append(File.generated(config, "reference/commands.md", content=page(build_parser())))
    return files


def page(parser: argparse.ArgumentParser) -> str:
    """The whole command line as Markdown: a section for each command, with its line and its arguments."""
    return "\n\n".join(["# Commands", INTRODUCTION, *sections(parser)]) + "\n"


def sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A section for each command below a parser; commands of a command get one each."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: str(choice.help) for choice in action._choices_actions}
        for name, command in action.choices.items():
            if deeper := list(sections(command)):
                yield from deeper
                continue
            text = helps[name][0].upper() + helps[name][1:]
            yield f"## `{command.prog}`\n\n{text}.\n\n{table(command)}".rstrip()


def table(command: argparse.ArgumentParser) -> str:
    """A command's arguments and flags, and below them those of each group; nothing if it has none."""
    positional, options, *groups = command._action_groups
    tables = [("", [*positional._group_actions, *options._group_actions])]
    for group in groups:
        title = re.sub(r"(--\w+( \w+)?)", r"`\1`", str(group.title))
        tables.append((f"{title[0].upper()}{title[1:]}:\n\n", group._group_actions))
    return "\n\n".join(f"{title}{rows}" for title, actions in tables if (rows := table_of(actions)))


def table_of(actions: list[argparse.Action]) -> str:
    """A table of arguments; nothing if there are none."""
    rows = [
        f"| `{spelled(action)}` | {action.help or ''} |"
        for action in actions
        if not {"--help", "--debug"} & set(action.option_strings)
    ]
    return "\n".join(["| Argument | Meaning |", "|---|---|", *rows]) if rows else ""


def spelled(action: argparse.Action) -> str:
    """An argument as it is typed: CONFIG, key=value …, --nproc N, --to {hf,megatfm}."""
    choices = ",".join(map(str, action.choices)) if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or (f"{{{choices}}}" if choices else action.dest.upper()))
    return " ".join([*action.option_strings, value]).strip() + (" …" if action.nargs == "*" else "")
