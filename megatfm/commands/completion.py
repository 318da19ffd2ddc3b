"""`megatfm completion SHELL`: a script with which a shell completes commands, flags, presets and keys."""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from megatfm.config import Config, preset_names
from megatfm.config.prep import PrepConfig

SHELLS = ("bash", "zsh", "fish")
LOADED = {
    "bash": "~/.local/share/bash-completion/completions/megatfm",
    "zsh": "a folder of $fpath, as _megatfm",
    "fish": "~/.config/fish/completions/megatfm.fish",
}


@dataclass(frozen=True)
class Words:
    """What may follow a command: flags with their help, and other words (actions, presets, keys of a config)."""

    help: str
    flags: Mapping[str, str]
    others: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    places = "; ".join(f"{shell}: {place}" for shell, place in LOADED.items())
    parser.add_argument("shell", choices=SHELLS, help=f"write what is printed to: {places}")


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completions of one of the shells."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](dict(_commands()))


def _commands() -> Iterator[tuple[str, Words]]:
    from megatfm import cli  # which imports this module by its name

    for action in cli.build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, parser in action.choices.items():
                yield name, _words(parser, name, texts[name])


def _words(parser: argparse.ArgumentParser, command: str, text: str) -> Words:
    flags: dict[str, str] = {}
    others: list[str] = []
    for each in _parsers(parser):
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                others += action.choices
            elif action.option_strings:
                flags |= dict.fromkeys(action.option_strings, action.help or "")
            elif action.choices:
                others += map(str, action.choices)
            elif action.dest == "config":
                others += preset_names()
            elif action.dest == "overrides":
                others += [f"{key}=" for key in _keys(PrepConfig if command == "prep" else Config)]
    return Words(text, flags, tuple(dict.fromkeys(others)))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A command's parser, and those of its actions (`config show`)."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a config; of sections that are chosen by name, those of all."""
    for name, field in section.model_fields.items():
        inside = [kind for kind in _kinds(field.annotation) if issubclass(kind, BaseModel)]
        if not inside:
            yield prefix + name
        for kind in inside:
            yield from _keys(kind, f"{prefix}{name}.")


def _kinds(annotation: Any) -> Iterator[type]:
    """The classes of an annotation that a dotted key leads into: not those inside lists and tables."""
    if isinstance(annotation, type):
        yield annotation
    elif getattr(annotation, "__origin__", None) not in (list, dict, tuple):
        for part in get_args(annotation):
            yield from _kinds(part)


def _bash(commands: Mapping[str, Words]) -> str:
    cases = "\n".join(
        f"    {name}) words={shlex.quote(' '.join([*words.flags, *words.others]))} ;;"
        for name, words in commands.items()
    )
    return f"""\
# bash completion for megatfm, made by `megatfm completion bash`
_megatfm() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} words={shlex.quote(" ".join([*commands, "--help", "--version"]))}
  [ "$COMP_CWORD" -eq 1 ] || case ${{COMP_WORDS[1]}} in
{cases}
    *) words= ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  [ "$COMP_CWORD" -eq 1 ] || mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$cur")
  [[ ${{COMPREPLY[0]-}} != *= ]] || compopt -o nospace 2>/dev/null
}}
complete -o filenames -F _megatfm megatfm
"""


def _zsh(commands: Mapping[str, Words]) -> str:
    listed = " ".join(shlex.quote(f"{name}:{words.help}") for name, words in commands.items())
    cases = "\n".join(
        f"    {name}) flags=({_described(words.flags)}) others=({shlex.join(words.others)}) ;;"
        for name, words in commands.items()
    )
    return f"""\
#compdef megatfm
# zsh completion for megatfm, made by `megatfm completion zsh`
_megatfm() {{
  local -a commands flags others
  commands=({listed})
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case $words[2] in
{cases}
  esac
  _describe flag flags
  compadd -S '' -a -- others
  _files
}}
if [[ $funcstack[1] == _megatfm ]]; then _megatfm "$@"; else compdef _megatfm megatfm; fi
"""


def _described(flags: Mapping[str, str]) -> str:
    return " ".join(shlex.quote(f"{flag}:{text.replace(':', ' ')}") for flag, text in flags.items())


def _fish(commands: Mapping[str, Words]) -> str:
    lines = ["# fish completion for megatfm, made by `megatfm completion fish`"]
    for name, words in commands.items():
        lines.append(f"complete -c megatfm -f -n __fish_use_subcommand -a {name} -d {_fished(words.help)}")
        seen = f"complete -c megatfm -n '__fish_seen_subcommand_from {name}'"
        for flag, text in words.flags.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(f"{seen} {kind} -d {_fished(text)}")
        if words.others:
            lines.append(f"{seen} -a {_fished(' '.join(words.others))}")
    return "\n".join(lines) + "\n"


def _fished(text: str) -> str:
    """Quoted for fish, where a backslash keeps a quote inside quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
