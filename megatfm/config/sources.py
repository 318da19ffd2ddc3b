"""Config files: find them and the presets, and merge a file with the bases that it extends."""

import difflib
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatfm.config.key_migrations import migrate
from megatfm.config.marked_strings import FromFile, map_strings
from megatfm.config.root import Config
from megatfm.config.section import Section, get_value_type, get_variant_name, list_variants
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean

MAX_DEPTH = 100
"""Largest depth of tables and lists within one another."""
ALIASES = {
    "gpt2": "gpt2-124m",
    "gpt2-small": "gpt2-124m",
    "gpt2-medium": "gpt2-355m",
    "gpt2-large": "gpt2-774m",
    "gpt2-1.5b": "gpt2-xl",
}
"""Alias → preset."""
RUN_FILES = ("environment.json", "checkpoints", "launch.json")
STORED_BESIDE = {
    "config.toml": (*RUN_FILES, "../launch.json"),
    "from.toml": RUN_FILES,
    "finetune.toml": (*RUN_FILES, "task"),
}
"""Name of a config that a command stores → files and folders of which it stores one beside it."""


@dataclass(frozen=True)
class ConfigFile:
    """One file of a config."""

    path: Path
    is_preset: bool
    """Whether it ships with megatfm."""
    values: dict[str, Any]
    """The file's keys without `extends` and `without`."""
    extends: str | None
    """The base: a preset's name, or a path relative to the file."""
    without: tuple[str, ...] = ()
    """Keys of the base that the file removes, such as `data.cache_dir`, so that their defaults apply."""

    @property
    def folder(self) -> Path:
        """The folder to which paths are relative; for a preset, the current directory."""
        return Path.cwd() if self.is_preset else self.path.resolve().parent

    @property
    def label(self) -> str:
        """The name of a preset, or the path of a file."""
        return f"preset {self.path.stem}" if self.is_preset else str(self.path)


def read_files(config_class: type[Section], path_or_preset: str | Path) -> list[ConfigFile]:
    """Read a config file or preset and the files that it extends, in that order. Raises UsageError."""
    files = [_read_file(config_class, *find_config(path_or_preset))]
    while (base := files[-1].extends) is not None:
        path, is_preset = _find_base(files[-1].path, base)
        known_paths = [file.path.resolve() for file in files]
        if path.resolve() in known_paths:
            cycle = [*files[known_paths.index(path.resolve()) :], files[known_paths.index(path.resolve())]]
            raise UsageError(
                f"{files[-1].path}: extends = {base!r}: a cycle, {' extends '.join(str(file.path) for file in cycle)}: "
                "take `extends` out of one of them"
            )
        files.append(_read_file(config_class, path, is_preset))
    return files


def merge_files(config_class: type[Section], files: list[ConfigFile]) -> dict[str, Any]:
    """Return the values of a config file merged with its bases. files: the file, its base, and so on.

    A run's config does not say where the run is, since its folder may have been moved: see `set_run_dir`.
    """
    folder = files[0].folder
    values: dict[str, Any] = {}
    for file in reversed(files):
        for key in file.without:
            _remove_key(values, key, file.path)
        stored = dict(file.values)
        if is_config_of_run(file.path):
            stored.pop("run_dir", None)
        is_elsewhere = file.folder != folder
        changes = map_strings(stored, partial(FromFile, folder=file.folder)) if is_elsewhere else stored
        values = merge_section(config_class, values, changes)
    tokenizers = [file for file in files if "tokenizer" in _get_table(file, "data") and not file.is_preset]
    if tokenizers and is_vocab_size_of_preset(files) and isinstance(values.get("model"), dict):
        values["model"].pop("vocab_size", None)  # the user's tokenizer decides it
    return values


def _remove_key(values: dict[str, Any], key: str, path: Path) -> None:
    """Remove a key or section of the bases. Raises UsageError if they don't set it."""
    *sections, last = key.split(".")
    table: Any = values
    for name in sections:
        table = table.get(name) if isinstance(table, dict) else None
    if not isinstance(table, dict) or last not in table:
        keys = [".".join([*sections, name]) for name in table] if isinstance(table, dict) else list(values)
        raise UsageError(
            f"{path}: without = [{key!r}]: the config that it extends does not set this"
            f"{did_you_mean(key, keys)}: leave it out"
        )
    del table[last]


def is_vocab_size_of_preset(files: list[ConfigFile]) -> bool:
    """Return whether `model.vocab_size` comes from a preset, not from a user's file."""
    return next((file.is_preset for file in files if "vocab_size" in _get_table(file, "model")), False)


def _get_table(file: ConfigFile, key: str) -> Mapping[str, Any]:
    table = file.values.get(key)
    return table if isinstance(table, Mapping) else {}


def _is_deeper(values: Mapping[str, Any], depth: int) -> bool:
    """Return whether tables and lists are nested deeper than that. Not recursive: TOML's headers nest without limit."""
    level: list[Any] = [values]
    for _ in range(depth):
        items = (item for table in level for item in (table.values() if isinstance(table, dict) else table))
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)


def _read_file(config_class: type[Section], path: Path, is_preset: bool) -> ConfigFile:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, thousands of digits, deep lists
        hint = ""
        if path.suffix != ".toml":
            hint = "; configs are TOML files, not YAML, JSON or Python"
        elif isinstance(error, UnicodeDecodeError):
            hint = ": save the file as UTF-8"
        elif str(error).startswith("Invalid value"):
            hint = ": text needs quotes, a boolean is true or false, and a key without a value is left out"
        raise UsageError(f"{path}: not valid TOML: {error}{hint}") from None
    except OSError as error:
        raise UsageError(f"{path}: can't read it: {error.strerror}") from error
    if _is_deeper(values, MAX_DEPTH):
        raise UsageError(f"{path}: has tables within tables, more than {MAX_DEPTH}: no config has so many")
    extends = values.pop("extends", None)
    if extends is not None and (not isinstance(extends, str) or not extends):
        raise UsageError(
            f"{path}: extends = {extends!r}: give one config, a preset's name or a path relative to this file, for "
            'example extends = "quickstart"'
        )
    removed_keys = values.pop("without", [])
    if not isinstance(removed_keys, list) or not all(isinstance(key, str) for key in removed_keys):
        raise UsageError(
            f"{path}: without = {removed_keys!r}: give a list of keys that the base sets, for example "
            'without = ["data.cache_dir"]'
        )
    if removed_keys and extends is None:
        raise UsageError(f"{path}: without = {removed_keys!r} takes keys out of a base: give it by `extends`")
    if config_class is Config and is_stored_by_us(path):
        values = migrate(values)
    return ConfigFile(path, is_preset, values, extends, tuple(removed_keys))


def _find_base(path: Path, base: str) -> tuple[Path, bool]:
    """Return the base of a config file, and whether it is a preset. Raises UsageError that names both."""
    try:
        sibling = Path(os.path.normpath(path.resolve().parent / Path(base).expanduser()))
        is_name = not sibling.is_file() and (base in ALIASES or base in list_presets())
        return find_config(base if is_name else sibling)
    except (OSError, RuntimeError, ValueError) as error:  # an unknown home folder, a name that is too long or no name
        raise UsageError(f"{path}: extends = {base!r}: {error}") from None
    except UsageError as error:
        hint = did_you_mean(base, [*list_presets(), *ALIASES])
        missing = f"no preset is named so, and there is no file {sibling}{hint}"
        raise UsageError(f"{path}: extends = {base!r}: {error if sibling.exists() else missing}") from None


def is_stored_by_us(path: Path) -> bool:
    """Return whether a config was written by a run, a conversion or a submission: judged by the files beside it."""
    return any((path.parent / name).exists() for name in STORED_BESIDE.get(path.name, ()))


def is_config_of_run(path: Path) -> bool:
    """Return whether a config is the one in a run directory; a copy may lack the lock."""
    return path.name == "config.toml" and any((path.parent / name).is_file() for name in ("lock", "environment.json"))


def set_run_dir(values: dict[str, Any], file: ConfigFile) -> None:
    """Add the folder of a run's config as its run directory, unless another `name` or `run_dir` makes it a new run.

    values: those of the file with overrides.
    """
    if is_config_of_run(file.path) and str(values.get("name")) == str(file.values.get("name")):
        values.setdefault("run_dir", str(file.path.absolute().parent))


def check_is_run(folder: Path) -> None:
    """Raise UsageError for a folder without a run's config: no run directory, or a run that has not begun."""
    if (folder / "config.toml").is_file():
        return
    if (folder / "launch.json").is_file():
        raise UsageError(f"{folder}: the run has not begun to train: `megatfm status {folder}` says why")
    raise UsageError(f"{folder}: not a run directory (it has no config.toml): give one such as runs/NAME")


def find_config(path_or_preset: str | Path) -> tuple[Path, bool]:
    """Return the path of a config, and whether it is a preset of megatfm. Raises UsageError."""
    presets = Path(str(resources.files("megatfm") / "presets"))
    path = Path(path_or_preset)
    preset = ALIASES.get(str(path_or_preset), str(path_or_preset))
    if path.is_file():
        return path, path.resolve().parent == presets.resolve()
    if preset in list_presets():
        return presets / f"{preset}.toml", True
    if path.is_dir() and (path / "config.toml").is_file():
        return path / "config.toml", False
    if (path / "config.json").is_file():
        raise UsageError(
            f"{path_or_preset}: a model in the Hugging Face format, no config: go on from it with `megatfm train "
            f"--from {path_or_preset} data.train=CORPUS/train`"
        )
    if path.is_dir():
        if (path / "launch.json").is_file():
            check_is_run(path)
        raise UsageError(f"{path_or_preset}: is a folder without config.toml: give a config file or a preset")
    if path.suffix == ".toml" or path.is_absolute() or path.parts[:1] == ("runs",):
        raise UsageError(f"{path_or_preset}: no such {'file' if path.suffix else 'file or folder'}")
    name = str(path_or_preset).rpartition("/")[2]  # of a model as a hub names it
    suggestions = difflib.get_close_matches(name.removesuffix(".toml"), list_presets(), n=3, cutoff=0.0)
    raise UsageError(
        f"{path_or_preset}: no such config file or preset{did_you_mean(name, [*list_presets(), *ALIASES])}; presets "
        f"named most like it: {', '.join(suggestions)}; `megatfm config presets` lists all"
    )


def list_presets() -> list[str]:
    """Return the names of megatfm's presets."""
    files = (resources.files("megatfm") / "presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def list_model_presets() -> list[str]:
    """Return the names of presets that train a model, not those of `megatfm prep`."""
    values = {name: merge_files(Config, read_files(Config, name)) for name in list_presets()}
    return [name for name in values if "read" not in values[name]]


# Merging tables by the types of their sections


def merge_section(annotation: Any, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base's table of a section with changes. annotation: the section's type.

    Sections merge at every depth. Values, lists and tables with the user's own names, such as `data.validation`,
    replace the base's; entries of one name merge if they are sections (`model.extra_heads`). Under another `name`, keys
    that only the base's variant has are dropped.
    """
    options = list_variants(annotation)
    merged = dict(base)
    if "name" in changes:
        drop_stale_keys(options, merged, changes["name"])
    section = choose_variant(options, changes.get("name", merged.get("name")))
    for key, value in changes.items():
        field = section.model_fields.get(key) if section else None
        base_value = merged.get(key)
        is_section = field is None or list_variants(field.annotation)  # no field: a plugin's key
        if isinstance(value, Mapping):
            base_table = base_value if isinstance(base_value, Mapping) else {}
            value_type = get_value_type(field.annotation) if field else None
            if list_variants(value_type):
                value = _merge_entries(value_type, base_table, value)
            else:
                value = merge_section(field.annotation if field else None, base_table if is_section else {}, value)
        merged[key] = value
    return merged


def _merge_entries(annotation: Any, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a table with the user's own names; an entry that the base has too changes the base's."""
    entries: dict[str, Any] = {}
    for key, entry in changes.items():
        base_entry = base.get(key)
        if isinstance(entry, Mapping) and isinstance(base_entry, Mapping):
            name_default = {"name": key} if "name" in entry else {}  # the key is the name of a head without one
            entry = merge_section(annotation, {**name_default, **base_entry}, entry)
        entries[key] = entry
    return entries


def drop_stale_keys(
    options: Sequence[type[BaseModel]], table: dict[str, Any], name: Any, keep: Collection[str] = ()
) -> None:
    """Remove the keys that only the old variant of a section has, when its name changes. keep: keys to keep."""
    old_name = table.get("name", get_variant_name(options[0]) if options else None)
    variant_by_name = {get_variant_name(option): option for option in options}
    plugin = variant_by_name.get(PydanticUndefined)
    if old_name == name or not (isinstance(old_name, str) and isinstance(name, str)):
        return
    old_variant, new_variant = variant_by_name.get(old_name, plugin), variant_by_name.get(name, plugin)
    if old_variant is None or new_variant is None:
        return
    stale = (
        (table if old_variant is plugin else old_variant.model_fields).keys()
        - new_variant.model_fields.keys()
        - {*keep}
    )
    for key in stale:
        table.pop(key, None)


def choose_variant(options: Sequence[type[BaseModel]], name: Any) -> type[BaseModel] | None:
    """Return the section class of a name; without a name the first, for an unknown one the plugin's."""
    if not options:
        return None
    variant_by_name = {get_variant_name(option): option for option in options}
    type_name = name if isinstance(name, str) else get_variant_name(options[0])
    return variant_by_name.get(type_name, variant_by_name.get(PydanticUndefined, options[0]))


def find_type(config_class: type[BaseModel], values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the type at a path of a config, by the variants that the config names; None if there is no such key."""
    annotation: Any = config_class
    value: Any = values
    for part in path:
        if options := list_variants(annotation):
            section = choose_variant(options, value.get("name") if isinstance(value, Mapping) else None)
            field = section.model_fields.get(part) if section else None
            annotation = field.annotation if field else None
        else:
            annotation = get_value_type(annotation)
        value = value.get(part) if isinstance(value, Mapping) else None
    return annotation
