"""`megatfm completion`: prints completion scripts for shells."""

import argparse
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from megatfm.config import Config, list_presets
from megatfm.config.prep import PrepConfig

COMPLETION_FILES = {
    "bash": "~/.local/share/bash-completion/completions/megatfm",
    "zsh": "a folder of $fpath, as _megatfm",
    "fish": "~/.config/fish/completions/megatfm.fish",
}
"""Shell → file for its completion script."""


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    files = "; ".join(f"{shell}: {file}" for shell, file in COMPLETION_FILES.items())
    parser.add_argument("shell", choices=tuple(COMPLETION_FILES), help=f"write the output to: {files}")


def completion_command(args: argparse.Namespace) -> int:
    """Print the script."""
    print(make_completion_script(args.shell))
    return 0


def make_completion_script(shell: str) -> str:
    """Return a shell's script that completes commands, flags, presets, config keys and values, and run directories."""
    import shtab

    from megatfm import cli

    parser = cli.build_parser()
    for command, actions in _iter_command_arguments(parser):
        for action in actions:
            if action.dest in ("config", "overrides"):
                kind = "prep" if command == "prep" else "training"
                action.complete = _call_function(f"_megatfm_settings_{kind}")
            elif action.dest in ("runs", "run_dir"):
                action.complete = _call_function("_megatfm_dir_runs")
            elif action.metavar in ("DIR", "FOLDER", "FILE", "MODEL", "SRC", "DST", "OUT"):
                action.complete = shtab.FILE
    preamble = (
        RUN_FUNCTIONS[shell]
        + _write_settings_function(shell, "training", Config)
        + _write_settings_function(shell, "prep", PrepConfig)
    )
    script = str(shtab.complete(parser, shell, preamble=preamble))
    return script + (BASH_WITHOUT_SPACE if shell == "bash" else "")


def _call_function(name: str) -> dict[str, str]:
    """Return shell → text by which shtab lets a shell function complete an argument."""
    return {"bash": name, "zsh": name, "fish": f"({name})"}


def _iter_command_arguments(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each command's name and arguments. An action such as `config show` has its command's name."""
    yield (command, [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from _iter_command_arguments(subparser, command or name)


def _iter_settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the dotted keys of a config, of all variants of its sections, with their values if these are few."""
    for name, field in section.model_fields.items():
        sections = [
            kind
            for kind in _iter_member_types(field.annotation)
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        for kind in sections:
            yield from _iter_settings(kind, f"{prefix}{name}.")
        if not sections:
            yield f"{prefix}{name}", tuple(_iter_values(field.annotation))


def _iter_member_types(annotation: Any) -> Iterator[Any]:
    """Yield the member types of an annotation, except those inside lists and tables."""
    origin = get_origin(annotation)
    if origin in (list, dict, tuple):
        return
    if origin is None or origin is Literal:
        yield annotation
        return
    for member in get_args(annotation):
        yield from _iter_member_types(member)


def _iter_values(annotation: Any) -> Iterator[str]:
    for member in _iter_member_types(annotation):
        if member is bool:
            yield from ("true", "false")
        elif get_origin(member) is Literal:
            yield from (str(value) for value in get_args(member) if not isinstance(value, NoneType))


def _write_settings_function(shell: str, kind: str, config: type[BaseModel]) -> str:
    """Return a shell function that completes a config, a key or a value from what was typed, its argument."""
    settings = dict[str, dict[str, None]]()
    for key, values in _iter_settings(config):
        settings.setdefault(key, {}).update(dict.fromkeys(values))
    keys = " ".join(f"{key}=" for key in settings)
    key_values = " ".join(f"{key}={value}" for key, values in settings.items() for value in values)
    texts = {"KIND": kind, "KEYS": keys, "VALUES": key_values, "PRESETS": " ".join(list_presets())}
    function = SETTINGS_FUNCTIONS[shell]
    for name, text in texts.items():
        function = function.replace(f"@{name}@", text)
    return function


RUN_FUNCTIONS = {
    "bash": """
_megatfm_dir_runs() {
  local config
  {
    compgen -d -- "$1"
    for config in runs/*/config.toml; do
      [ ! -e "$config" ] || compgen -W "${config%/config.toml}" -- "$1"
    done
  } | sort -u
}
""",
    "zsh": """
_megatfm_dir_runs() {
  local -a configs
  configs=(runs/*/config.toml(N:h))
  compadd -- $configs
  _files -/
}
""",
    "fish": """
function _megatfm_dir_runs
  for config in runs/*/config.toml
    string replace -r '/config.toml$' '' -- $config
  end
  __fish_complete_directories (commandline -ct)
end
""",
}
SETTINGS_FUNCTIONS = {
    # readline splits words at = by default; then only the value is completed.
    "bash": """
_megatfm_settings_@KIND@() {
  local typed="$1" key='' value="$1" before="${COMP_WORDS[COMP_CWORD-1]}" word
  case "$1" in
    =) key="$before=" value='' typed="$before=" ;;
    *=*) value="${1#*=}" ;;
    *) [ "$before" != = ] || { key="${COMP_WORDS[COMP_CWORD-2]}=" typed="${COMP_WORDS[COMP_CWORD-2]}=$1"; } ;;
  esac
  if [[ "$typed" != *=* ]]; then
    compgen -W "@PRESETS@ @KEYS@" -- "$typed"
    compgen -f -- "$typed"
    return
  fi
  while IFS= read -r word; do printf '%s\\n' "${word#"$key"}"; done < <(compgen -W "@VALUES@" -- "$typed")
  compgen -f -P "${typed:${#key}:${#typed}-${#key}-${#value}}" -- "$value"
}
""",
    "zsh": """
_megatfm_settings_@KIND@() {
  if [[ $PREFIX == *=* ]]; then
    compadd -- @VALUES@
    compset -P '*=' && _files
  else
    compadd -S '' -- @KEYS@
    compadd -- @PRESETS@
    _files
  fi
}
""",
    "fish": """
function _megatfm_settings_@KIND@
  if string match -q '*=*' -- (commandline -ct)
    printf '%s\\n' @VALUES@
  else
    printf '%s\\n' @PRESETS@ @KEYS@
    __fish_complete_path (commandline -ct)
  end
end
""",
}
BASH_WITHOUT_SPACE = """

_megatfm() {
  _shtab_megatfm "$@"
  [[ "${COMPREPLY[0]-}" != *= ]] || compopt -o nospace 2>/dev/null || :
}
complete -o bashdefault -F _megatfm megatfm"""
