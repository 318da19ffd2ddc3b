"""Load a config: files and presets, then `key=value` overrides, then validation. Errors are one line."""

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from megatfm.config.key_migrations import find_renamed_keys, migrate
from megatfm.config.marked_strings import FromCommandLine, map_strings
from megatfm.config.prep import PrepConfig
from megatfm.config.root import Config
from megatfm.config.section import Section, is_text, list_variants
from megatfm.config.sources import (
    drop_stale_keys,
    find_type,
    is_vocab_size_of_preset,
    merge_files,
    read_files,
    set_run_dir,
)
from megatfm.config.validation_errors import format_config_error, suggest_keys
from megatfm.errors import MegatfmError, UsageError
from megatfm.registry import add_plugin_folders

CORPUS = "data.corpus"
"""Shorthand for data.train, data.validation and, for objectives that read text, data.tokenizer of a corpus of `megatfm
prep`."""
COMMAND_OF: dict[type[Section], str] = {Config: "train", PrepConfig: "prep"}
"""Config class → the command that takes it."""

NULLS = ("null", "Null", "NULL", "None")
"""Words of other languages for no value, as an override's value."""
AnySection = TypeVar("AnySection", bound=Section)


def load_config(
    path_or_preset: str | Path, overrides: Sequence[str] = (), replaced_sections: Mapping[str, Any] | None = None
) -> Config:
    """Load the training config of a file or preset, with `key=value` overrides. Raises UsageError."""
    config = load_section(Config, path_or_preset, overrides, replaced_sections)
    return config if config.reads_text else _drop_corpus_tokenizer(config, overrides)


def read_values(config_class: type[Section], path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a config file (None: no file) and of overrides, without validation. Raises UsageError."""
    files = read_files(config_class, path) if path else []
    values = merge_files(config_class, files) if files else {}
    apply_overrides(config_class, values, overrides)
    if files:
        set_run_dir(values, files[0])
    return values


def load_section(
    config_class: type[AnySection],
    path_or_preset: str | Path,
    overrides: Sequence[str] = (),
    replaced_sections: Mapping[str, Any] | None = None,
) -> AnySection:
    """Read, override and validate a config. replaced_sections: sections in place of the file's.

    A file with `extends` changes the preset or file that it names. Paths in a file are relative to the file; in presets
    of megatfm and in overrides, to the current directory. Raises UsageError: one line with key, value, reason and a way
    out.
    """
    if config_class is PrepConfig and Path(path_or_preset).is_dir():
        raise UsageError(
            f"{path_or_preset}: is a folder, not a config: to prepare the text in it, `megatfm prep quickstart-data "
            f"read.folder={path_or_preset} out=corpora/NAME`"
        )
    files = read_files(config_class, path_or_preset)
    values = merge_files(config_class, files)
    values |= _keep_options(replaced_sections or {}, values, files[0].values)
    if not replaced_sections and is_vocab_size_of_preset(files):
        drop_preset_vocab_size(values, overrides)
    apply_overrides(config_class, values, overrides)
    set_run_dir(values, files[0])
    bases = ", ".join(str(file.path) for file in files[1:] if not file.is_preset)
    subject = f"{path_or_preset} (extends {bases})" if bases else str(path_or_preset)
    if config_class is Config and (renamed := find_renamed_keys(values)):
        names = ", ".join(f"{old} is {new} now" for old, new in renamed)
        raise UsageError(f"{subject}: keys that have other names: {names}: write these")
    try:
        config = config_class.model_validate(values, context={"base": files[0].folder})
    except ValidationError as error:
        _check_command(path_or_preset, config_class, values)
        for file in files[1:]:
            _check_command(file.path, config_class, file.values)
        raise UsageError(f"{subject}: {format_config_error(error, config_class, values)}") from None
    if isinstance(config, Config | PrepConfig):
        folders = [file.path.resolve().parent for file in files]
        # A run directory may come from another user: reading its config must not make its code importable.
        trusted = [folder for folder in folders if not (folder / "checkpoints").is_dir()]
        add_plugin_folders(config.plugins, [*trusted, Path.cwd()])
    return config


def _keep_options(
    replaced_sections: Mapping[str, Any], values: Mapping[str, Any], file_values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the replaced sections; a replaced model keeps `[model.lora]`, and a task's `[model.extra_heads]`.

    file_values: of the file alone, without those of the preset that it extends, whose heads are another model's.
    """
    model, resolved_model, file_model = (section.get("model") for section in (replaced_sections, values, file_values))
    if not isinstance(model, Mapping) or not isinstance(resolved_model, Mapping):
        return replaced_sections
    sections = {"lora": resolved_model["lora"]} if "lora" in resolved_model else {}
    if values.get("task") and isinstance(file_model, Mapping) and "extra_heads" in file_model:
        sections["extra_heads"] = {**(model.get("extra_heads") or {}), **file_model["extra_heads"]}
    return {**replaced_sections, "model": {**model, **sections}}


def _check_command(path_or_preset: str | Path, config_class: type[Section], values: Mapping[str, Any]) -> None:
    """Raise UsageError with the right command if a config's sections are all those of the other config class."""
    alternative_class = next(candidate for candidate in COMMAND_OF if candidate is not config_class)
    unknown = [key for key in values if key not in config_class.model_fields]
    if unknown and all(key in alternative_class.model_fields for key in values):
        command, alternative_command = COMMAND_OF[config_class], COMMAND_OF[alternative_class]
        required = [key for key, field in config_class.model_fields.items() if field.is_required()]
        raise UsageError(
            f"{path_or_preset}: is a config of `megatfm {alternative_command}`, with {', '.join(unknown)}; `megatfm "
            f"{command}` takes one with {', '.join(required)}: use `megatfm {alternative_command} {path_or_preset}`"
        )


def parse_stored_config(path: Path, state: Mapping[str, Any]) -> Config:
    """Return the config in a checkpoint's state, which unlike RUN/config.toml never changes.

    path: of the checkpoint. Raises MegatfmError if this version can't read the config.
    """
    try:
        return Config.model_validate(migrate(state.get("config")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config"
        raise MegatfmError(
            f"{path}: this version of megatfm can't read its config ({key}: {first['msg']}): use the one that wrote "
            f"it, {state.get('megatfm', 'which it does not name')}"
        ) from None


def to_toml(config: Section) -> str:
    """Return a config as TOML with every default; keys that are None are left out."""
    return tomli_w.dumps(map_strings(config.model_dump(exclude_none=True), str))


def get_overridden_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys of `key=value` overrides."""
    return {override.partition("=")[0].strip() for override in overrides}


def apply_overrides(config_class: type[BaseModel], values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides to the nested tables of a config, in their order. Raises UsageError.

    `key=value` sets a key; the value is TOML, or a plain string. `key=` and `~key` remove a key or section, so that its
    default applies. A new `name` of a section removes the keys that only the old variant has. `data.corpus=DIR` sets
    the training and validation corpus and the tokenizer.
    """
    overridden = get_overridden_keys(overrides)
    for override in overrides:
        key, equals, text = override.partition("=")
        key, text = key.strip(), text.strip()
        if key.startswith("~") and not equals:
            key, equals = key[1:], "="
        path = key.split(".")
        if not equals or not all(path):
            raise UsageError(f"override {override!r}: expected key=value, for example train.steps=100")
        if key == "extends":
            raise UsageError(
                f"override {override!r}: `extends` stands in a config file; here, give {text or 'a config'} as CONFIG"
            )
        if text in NULLS:
            raise UsageError(f"override {override!r}: configs have no null: {key}= removes the key, for its default")
        if key == CORPUS and text:
            folder = _parse(override, text)
            _set_corpus(values, override, folder if isinstance(folder, str) else text)
            continue
        table = _descend(values, path[:-1], override, create=bool(text))
        if not text:
            types = [find_type(config_class, values, path[:depth]) for depth in range(1, len(path) + 1)]
            if table.pop(path[-1], None) is None and types[-1] is None and Any not in types:
                hint = suggest_keys(key, (), config_class)
                raise UsageError(f"override {override!r}: nothing sets {key}, an unknown key{hint}: leave it out")
            continue
        value = _parse(override, text)
        if not isinstance(value, str | list | dict) and is_text(find_type(config_class, values, path)):
            value = FromCommandLine(text)
        if path[-1] == "name" and len(path) > 1:
            section = ".".join(path[:-1])
            overridden_keys = {key.removeprefix(f"{section}.") for key in overridden if key.startswith(f"{section}.")}
            drop_stale_keys(list_variants(find_type(config_class, values, path[:-1])), table, value, overridden_keys)
        table[path[-1]] = value


def drop_preset_vocab_size(values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Remove a preset's vocab_size if overrides set another tokenizer and not `model.vocab_size`."""
    overridden = get_overridden_keys(overrides)
    model = values.get("model")
    if overridden & {CORPUS, "data.tokenizer"} and "model.vocab_size" not in overridden and isinstance(model, dict):
        model.pop("vocab_size", None)


def _set_corpus(values: dict[str, Any], override: str, folder: str) -> None:
    data = _descend(values, ["data"], override)
    for key in ("mixture", "mixture_schedule"):
        data.pop(key, None)
    parent = folder.rstrip("/")  # on S3, c//train is another key than c/train
    data["train"] = FromCommandLine(f"{parent}/train")
    data["validation"] = {"validation": FromCommandLine(f"{parent}/validation")}
    data["tokenizer"] = FromCommandLine(folder)


def _drop_corpus_tokenizer(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config without the tokenizer that `data.corpus` sets, which a corpus of images may lack."""
    overridden = get_overridden_keys(overrides)
    if CORPUS not in overridden or "data.tokenizer" in overridden:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": None})})


def _descend(values: dict[str, Any], parts: Sequence[str], override: str, create: bool = True) -> dict[str, Any]:
    """Return a table; without `create`, one that is missing is not entered into `values`."""
    table = values
    for part in parts:
        table = table.setdefault(part, {}) if create else table.get(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"override {override!r}: {part!r} is a value in this config, not a section")
    return table


def _parse(override: str, text: str) -> Any:
    try:
        value, *further_keys = tomllib.loads(f"value = {text}").values()
    except tomllib.TOMLDecodeError:
        return FromCommandLine(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"override {override[:40]}…: {error}") from None
    if further_keys or isinstance(value, date | time):  # a text's later lines may look like keys
        return FromCommandLine(text)
    return map_strings(value, FromCommandLine)
