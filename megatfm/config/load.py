"""Load a config: files and presets, then `key=value` overrides, then validation. Errors are one line."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from megatfm.config.foreign_keys import list_foreign_keys, translate_foreign_key
from megatfm.config.key_migrations import find_renamed_keys, migrate
from megatfm.config.marked_strings import FromCommandLine, map_strings
from megatfm.config.prep import PrepConfig
from megatfm.config.root import Config
from megatfm.config.section import Section, get_item_type, get_variant_name, is_text, list_sections, list_variants
from megatfm.config.sources import (
    drop_stale_keys,
    find_type,
    is_vocab_size_of_preset,
    merge_files,
    read_files,
    set_run_dir,
)
from megatfm.errors import MegatfmError, UsageError
from megatfm.registry import add_plugin_folders, did_you_mean

CORPUS = "data.corpus"
"""Shorthand for data.train, data.validation and, for objectives that read text, data.tokenizer of a corpus of `megatfm
prep`."""
COMMAND_OF: dict[type[Section], str] = {Config: "train", PrepConfig: "prep"}
"""Config class → the command that takes it."""

NULLS = ("null", "Null", "NULL", "None")
"""Words of other languages for no value, as an override's value."""
MAX_SUGGESTIONS = 3
"""Most keys that an error suggests for one of a name that several sections have."""

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
                hint = _suggest_keys(key, (), config_class)
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


def format_config_error(error: ValidationError, config_class: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the first of a config's errors as `key = value: reason; way out`, or all keys that are unknown."""
    errors = error.errors(include_url=False)
    # A misspelled key leaves its right name missing, and a wrong one what follows from it: what is there says more.
    unknown = [item for item in errors if item["type"] == "extra_forbidden"]
    present = unknown or [item for item in errors if item["type"] != "missing"]
    first = present[0] if present and errors[0]["type"] == "missing" else errors[0]
    path, section, value = _locate_error(first["loc"], config_class, values)
    message = first["msg"].removeprefix("Value error, ")
    n_more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    key = ".".join(path) or "config"
    if len(unknown) > 1 or first["type"] == "extra_forbidden":
        hints: dict[str, str] = {}
        for item in unknown:
            path, section, value = _locate_error(item["loc"], config_class, values)
            known_keys = list(section.model_fields) if section else []
            key = ".".join(path)
            foreign_keys = list_foreign_keys(key, value) if config_class is Config else []
            hints |= {name: _suggest_keys(name, known_keys, config_class) for name in foreign_keys or [key]}
        if len(hints) > 1:
            return f"{len(hints)} unknown keys: {'; '.join(map(''.join, hints.items()))}"
        known_text = f"known here: {', '.join(known_keys)}" if known_keys else ""
        (key, hint), *_ = hints.items()
        return f"{key}: unknown key{hint}; {known_text}{n_more}"
    if first["type"] == "missing" and value is None:
        reason, example = _explain_by_name(values, path), _give_example(section, path)
        return f"{key}: is required{reason}{example}{_list_other_missing_keys(error) or n_more}"
    if first["type"] == "value_error":
        return f"{key + ': ' if path else ''}{message}{n_more}"
    if first["type"].startswith("union_tag"):
        choices = first.get("ctx", {}).get("expected_tags", "")
        return f"{key}.name: unknown or missing; choose one of {choices}{n_more}"
    text = repr(value)
    text = f"{text[:80]}…" if len(text) > 100 else text
    if list_sections(section, path[-1]) or first["type"] == "model_type":
        message = "this is a section"
    elif first["type"] in ("list_type", "tuple_type"):
        message = "this is a list"
    elif first["type"] == "missing":
        message = "has too few elements"
    return f"{key} = {text}: {message[0].lower()}{message[1:]}{_give_example(section, path)}{n_more}"


def _suggest_keys(key: str, known_keys: Sequence[str], config_class: type[BaseModel]) -> str:
    """Return the end of an error: in place of an unknown key, a like one of its section, or one of another section."""
    section, _, name = key.rpartition(".")
    our_keys = [candidate for candidate in find_keys(key, config_class) if candidate != key]
    elsewhere = f" (did you mean {' or '.join(our_keys)}?)" if our_keys else ""
    longer_or_shorter = [known for known in known_keys if known.startswith(name) or name.startswith(known)]
    if section and not translate_foreign_key(key) and longer_or_shorter:
        return did_you_mean(name, longer_or_shorter)
    return elsewhere or did_you_mean(name, known_keys)


def find_keys(key: str, config_class: type[BaseModel] = Config) -> list[str]:
    """Return our dotted keys that a key may mean: another framework's, or one without its section or below another."""
    name = key.rpartition(".")[2]
    if config_class is Config and (our_key := translate_foreign_key(key)):
        return [our_key]
    nested_keys = dict.fromkeys(_find_nested_keys(name, config_class))
    least_depth = min((key.count(".") for key in nested_keys), default=0)
    keys = [key for key in nested_keys if key.count(".") == least_depth]
    return keys if len(keys) <= MAX_SUGGESTIONS and name != "name" else []


def _find_nested_keys(name: str, config_class: type[BaseModel]) -> Iterator[str]:
    if name in config_class.model_fields:
        yield name
    for key in config_class.model_fields:
        for section in list_sections(config_class, key):
            yield from (f"{key}.{path}" for path in _find_nested_keys(name, section))


def _locate_error(
    loc: tuple[int | str, ...], config_class: type[BaseModel], values: Mapping[str, Any]
) -> tuple[list[str], type[BaseModel] | None, Any]:
    """Return key path, section class and value at an error's location, without pydantic's tags of unions.

    A section in a list is `key[0]`; the path into a table or list of plain values ends at its key.
    """
    path: list[str] = []
    section: type[BaseModel] | None = config_class
    value: Any = values
    annotation: Any = config_class
    for part in loc:
        options = list_variants(annotation)
        if tagged := [option for option in options if get_variant_name(option) == part]:
            annotation = tagged[0]
            continue
        if options:
            variant = value.get("name", path[-1] if path else None) if isinstance(value, Mapping) else value
            section = next((option for option in options if get_variant_name(option) == variant), options[0])
            field = section.model_fields.get(str(part))
            annotation = field.annotation if field else None
            path.append(str(part))
        elif list_variants(item_type := get_item_type(annotation)):
            section, annotation = None, item_type
            path = [*path[:-1], f"{path[-1]}[{part}]"] if isinstance(part, int) else [*path, part]
        else:
            break
        if isinstance(value, Mapping):
            value = value.get(str(part))
        else:  # a section may be given by its name alone
            value = value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
    return path, section, value


def _explain_by_name(values: Mapping[str, Any], path: Sequence[str]) -> str:
    """Return the section's name, if the config sets one: the reason why the key is required."""
    value: Any = values
    for key in path[:-1]:
        value = value.get(key) if isinstance(value, Mapping) else None
    name = value.get("name") if isinstance(value, Mapping) and len(path) > 1 else value
    return f" by name = {str(name)!r}" if isinstance(name, str) else ""


def _list_other_missing_keys(error: ValidationError) -> str:
    """Return the other missing keys of the same section, if there are no other errors."""
    first, *later_errors = error.errors(include_url=False)
    if not all(item["type"] == "missing" and item["loc"][:-1] == first["loc"][:-1] for item in later_errors):
        return ""
    return f" (and {', '.join(str(item['loc'][-1]) for item in later_errors)})" if later_errors else ""


def _give_example(section: type[BaseModel] | None, path: Sequence[str]) -> str:
    key = path[-1]
    field = section.model_fields.get(key) if section else None
    if field is None:
        return ""
    if field.examples:
        return f"; for example {field.examples[0]!r}"
    if sections := list_sections(section, key):
        return f"; for example {'.'.join(path)} = {_write_inline_table(sections[0])}"
    default = field.get_default(call_default_factory=True, validated_data={})
    value = list(default) if isinstance(default, tuple) else default
    return "" if field.is_required() or default is None else f"; the default is {value!r}"


def _write_inline_table(section: type[BaseModel]) -> str:
    """Return the required keys of a section, with examples, as an inline TOML table."""
    keys = []
    for key, field in section.model_fields.items():
        example = next(iter(field.examples or ()), None)
        if field.is_required() and (sections := list_sections(section, key)):
            keys.append(f"{key} = {_write_inline_table(sections[0])}")
        elif example is not None and (field.is_required() or (field.default is None and isinstance(example, str))):
            keys.append(f"{key} = {json.dumps(example)}")
    keys = keys or [f"name = {json.dumps(name)}" for name in [get_variant_name(section)] if isinstance(name, str)]
    return f"{{ {', '.join(keys)} }}" if keys else "{}"
