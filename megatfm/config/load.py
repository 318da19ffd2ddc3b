"""Reading a config: a TOML file or a preset's name, then `key=value` overrides, then types and ranges."""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from megatfm.config.base import Section, name_of
from megatfm.config.edit import apply_overrides, let_vocabulary_follow, sections_of
from megatfm.config.key_migrations import find_renamed_keys, migrate
from megatfm.config.other_names import FOREIGN_KEYS
from megatfm.config.prep import PrepConfig
from megatfm.config.root import Config
from megatfm.errors import UsageError
from megatfm.registry import add_plugin_folders, did_you_mean

ALIASES = {
    "gpt2": "gpt2-124m",
    "gpt2-small": "gpt2-124m",
    "gpt2-medium": "gpt2-355m",
    "gpt2-large": "gpt2-774m",
    "gpt2-1.5b": "gpt2-xl",
}
"""Other names of presets."""

COMMAND_OF: dict[type[Section], str] = {Config: "train", PrepConfig: "prep"}
"""Whose config is of which kind."""

AnySection = TypeVar("AnySection", bound=Section)


def load_config(
    path_or_preset: str | Path,
    overrides: Sequence[str] = (),
    replaced_sections: Mapping[str, Any] | None = None,
) -> Config:
    """The training config in a file or preset, with `key=value` overrides. Raises UsageError."""
    return load(Config, path_or_preset, overrides, replaced_sections)


def load(
    config_class: type[AnySection],
    path_or_preset: str | Path,
    overrides: Sequence[str] = (),
    replaced_sections: Mapping[str, Any] | None = None,
) -> AnySection:
    """Read, override and validate a config of `kind`. replaced_sections: sections that stand in the place of the
    file's.

    Relative paths in a file are relative to the file; in a preset that ships with megatfm, and in overrides,
    to the current directory. Raises UsageError: one line with key, value, reason and a way out.
    """
    if config_class is PrepConfig and Path(path_or_preset).is_dir():
        raise UsageError(
            f"{path_or_preset}: is a folder, not a config: to prepare the text in it, `megatfm prep quickstart-data "
            f"read.folder={path_or_preset} out=corpora/NAME`"
        )
    path, is_preset = find_config(path_or_preset)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, thousands of digits, lists in lists
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: can't read it: {error.strerror}") from error
    if config_class is Config and _is_stored_by_us(path):
        values = migrate(values)
    values |= replaced_sections or {}
    if is_preset and not replaced_sections:
        let_vocabulary_follow(values, overrides)
    apply_overrides(config_class, values, overrides)
    if config_class is Config and (renamed := find_renamed_keys(values)):
        names = ", ".join(f"{old} is {new} now" for old, new in renamed)
        raise UsageError(f"{path_or_preset}: keys that have other names: {names}: write these")
    base = Path.cwd() if is_preset else path.resolve().parent
    try:
        config = config_class.model_validate(values, context={"base": base})
    except ValidationError as error:
        _check_command(path_or_preset, config_class, values)
        raise UsageError(f"{path_or_preset}: {_format_error(error, config_class, values)}") from None
    if isinstance(config, Config | PrepConfig):
        beside = path.resolve().parent
        # A run may be anybody's: code in it must not become importable by reading its config.
        add_plugin_folders(config.plugins, [*[beside] * (not (beside / "checkpoints").is_dir()), Path.cwd()])
    return config


def _is_stored_by_us(path: Path) -> bool:
    """Tell a config that a run, a conversion or a submission has left from a user's file: by what lies beside it."""
    beside = ("environment.json", "checkpoints", "launch.json", "../launch.json")
    return path.name == "config.toml" and any((path.parent / name).exists() for name in beside)


def _check_command(
    path_or_preset: str | Path, config_class: type[Section], values: Mapping[str, Any]
) -> None:
    """Raise a UsageError that names the command to use, where a config's sections are all the other kind's."""
    other = next(each for each in COMMAND_OF if each is not config_class)
    theirs = [key for key in values if key not in config_class.model_fields]
    if theirs and all(key in other.model_fields for key in values):
        here, there = COMMAND_OF[config_class], COMMAND_OF[other]
        raise UsageError(
            f"{path_or_preset}: is a config of `megatfm {there}`, with {', '.join(theirs)}; `megatfm {here}` takes one "
            f"with {', '.join(key for key, field in config_class.model_fields.items() if field.is_required())}: use "
            f"`megatfm {there} {path_or_preset}`"
        )


def find_config(path_or_preset: str | Path) -> tuple[Path, bool]:
    """The file of a config, and whether it is a preset that ships with megatfm. Raises UsageError."""
    presets = Path(str(resources.files("megatfm") / "presets"))
    path = Path(path_or_preset)
    preset = ALIASES.get(str(path_or_preset), str(path_or_preset))
    if path.is_file():
        return path, path.resolve().parent == presets.resolve()
    if preset in preset_names():
        return presets / f"{preset}.toml", True
    if path.is_dir() and (path / "config.toml").is_file():
        return path / "config.toml", False
    if (path / "config.json").is_file():
        raise UsageError(
            f"{path_or_preset}: a model in the Hugging Face format, no config: go on from it with `megatfm train "
            f"--from {path_or_preset} data.train=CORPUS/train`"
        )
    if path.is_dir():
        raise UsageError(f"{path_or_preset}: is a folder without config.toml: give a config file or a preset")
    if path.suffix == ".toml" or path.is_absolute() or path.parts[:1] == ("runs",):
        raise UsageError(f"{path_or_preset}: no such {'file' if path.suffix else 'file or folder'}")
    word = str(path_or_preset).rpartition("/")[2]  # of a model as a hub names it
    near = difflib.get_close_matches(word.removesuffix(".toml"), preset_names(), n=3, cutoff=0.0)
    raise UsageError(
        f"{path_or_preset}: no such config file or preset{did_you_mean(word, [*preset_names(), *ALIASES])}; presets "
        f"named most like it: {', '.join(near)}; `megatfm config presets` lists all"
    )


def preset_names() -> list[str]:
    """The names of the presets that ship with megatfm."""
    files = (resources.files("megatfm") / "presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def presets_of_models() -> list[str]:
    """The names of presets that train a model; others read data, which they prepare."""
    files = resources.files("megatfm") / "presets"
    texts = {name: (files / f"{name}.toml").read_text(encoding="utf-8") for name in preset_names()}
    return [name for name, text in texts.items() if "read" not in tomllib.loads(text)]


def to_toml(config: Section) -> str:
    """A config as TOML, every default spelled out; what is not set (None) is left out."""
    return tomli_w.dumps(_to_builtin(config.model_dump(exclude_none=True)))


def _to_builtin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_builtin(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _format_error(error: ValidationError, config_class: type[BaseModel], values: Mapping[str, Any]) -> str:
    """The first of a config's mistakes: key = value: reason; way out."""
    first = error.errors(include_url=False)[0]
    place, section, given = _locate(first["loc"], config_class, values)
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    key = ".".join(place) or "config"
    if first["type"] == "extra_forbidden":
        known = list(section.model_fields) if section else []
        ours = FOREIGN_KEYS.get(place[-1].lower()) if config_class is Config else None
        hint = f" (did you mean {ours}?)" if ours and ours != key else did_you_mean(place[-1], known)
        return f"{key}: unknown key{hint}; {_known(known)}{more}"
    if first["type"] == "missing" and given is None:
        return f"{key}: is required{_by_name(values, place)}{_example(section, place)}{_also(error) or more}"
    if first["type"] == "value_error":
        return f"{key + ': ' if place else ''}{message}{more}"
    if first["type"].startswith("union_tag"):
        choices = first.get("ctx", {}).get("expected_tags", "")
        return f"{key}.name: unknown or missing; choose one of {choices}{more}"
    shown = repr(given)
    shown = f"{shown[:80]}…" if len(shown) > 100 else shown
    if sections_of(section, place[-1]):
        message = "this is a section"
    elif first["type"] in ("list_type", "tuple_type"):
        message = "this is a list"
    elif first["type"] == "missing":
        message = "has too few elements"
    return f"{key} = {shown}: {message[0].lower()}{message[1:]}{_example(section, place)}{more}"


def _locate(
    loc: tuple[int | str, ...], config_class: type[BaseModel], values: Mapping[str, Any]
) -> tuple[list[str], type[BaseModel] | None, Any]:
    """Follow an error's location; the tags that pydantic inserts for unions are not keys, so they go."""
    place: list[str] = []
    section: type[BaseModel] | None = config_class
    given: Any = values
    for index, part in enumerate(loc):
        options = sections_of(section, place[-1]) if section and place else []
        tagged = [option for option in options if name_of(option) == part]
        if tagged:
            section = tagged[0]
            continue
        if options:
            named = given.get("name") if isinstance(given, Mapping) else given
            section = next((o for o in options if name_of(o) == named), options[0])
        place.append(str(part))
        if isinstance(given, Mapping) or (isinstance(given, str) and options):
            given = (
                given.get(str(part)) if isinstance(given, Mapping) else None
            )  # a name in place of a section
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        if index < len(loc) - 1 and section and not sections_of(section, place[-1]):
            break
    return place, section, given


def _by_name(values: Mapping[str, Any], place: Sequence[str]) -> str:
    """The name that a config gives a section, and by which a key of that is required."""
    given: Any = values
    for key in place[:-1]:
        given = given.get(key) if isinstance(given, Mapping) else None
    name = given.get("name") if isinstance(given, Mapping) and len(place) > 1 else given
    return f" by name = {str(name)!r}" if isinstance(name, str) else ""


def _also(error: ValidationError) -> str:
    """The other keys that are missing in the same section, if these are all other mistakes."""
    first, *others = error.errors(include_url=False)
    if not all(e["type"] == "missing" and e["loc"][:-1] == first["loc"][:-1] for e in others):
        return ""
    return f" (and {', '.join(str(e['loc'][-1]) for e in others)})" if others else ""


def _example(section: type[BaseModel] | None, place: Sequence[str]) -> str:
    key = place[-1]
    field = section.model_fields.get(key) if section else None
    if field is None:
        return ""
    if field.examples:
        return f"; for example {field.examples[0]!r}"
    if parts := sections_of(section, key):
        return f"; for example {'.'.join(place)} = {_inline(parts[0])}"
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = list(default) if isinstance(default, tuple) else default
    return "" if field.is_required() or default is None else f"; the default is {shown!r}"


def _inline(section: type[BaseModel]) -> str:
    """What a section must hold, with examples, as a table in one line of TOML."""
    keys = []
    for key, field in section.model_fields.items():
        example = next(iter(field.examples or ()), None)
        if field.is_required() and (parts := sections_of(section, key)):
            keys.append(f"{key} = {_inline(parts[0])}")
        elif example is not None and (
            field.is_required() or (field.default is None and isinstance(example, str))
        ):
            keys.append(f"{key} = {json.dumps(example)}")
    keys = keys or [f"name = {json.dumps(name)}" for name in [name_of(section)] if isinstance(name, str)]
    return f"{{ {', '.join(keys)} }}" if keys else "{}"


def _known(known: Sequence[str]) -> str:
    return f"known here: {', '.join(known)}" if known else ""
