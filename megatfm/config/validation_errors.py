"""Errors of validation as one line: key, value, reason and a way out; keys of other names are suggested."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from megatfm.config.foreign_keys import list_foreign_keys, translate_foreign_key
from megatfm.config.root import Config
from megatfm.config.section import get_item_type, get_variant_name, list_sections, list_variants
from megatfm.config.sources import find_type
from megatfm.registry import did_you_mean

MAX_SUGGESTIONS = 3
"""Most keys that an error suggests for one of a name that several sections have."""


def format_config_error(error: ValidationError, config_class: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the first of a config's errors as `key = value: reason; way out`, or all keys that are unknown.

    The line is one, even if a name of the user's own has line breaks.
    """
    message = _explain(error, config_class, values)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)


def _explain(error: ValidationError, config_class: type[BaseModel], values: Mapping[str, Any]) -> str:
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
            hints |= {name: suggest_keys(name, known_keys, config_class) for name in foreign_keys or [key]}
        if len(hints) > 1:
            return f"{len(hints)} unknown keys: {'; '.join(map(''.join, hints.items()))}"
        known_text = f"known here: {', '.join(known_keys)}" if known_keys else ""
        (key, hint), *_ = hints.items()
        return f"{key}: unknown key{hint}; {known_text}{n_more}"
    if first["type"] == "missing" and value is None:
        reason, example = _explain_by_name(values, path), _give_example(section, path)
        return f"{key}: is required{reason}{example}{_list_other_missing_keys(error) or n_more}"
    if first["type"] == "value_error" and path:
        sections, first_word = list_variants(find_type(config_class, values, path)), re.split(r"\W", message)[0]
        begins_with_key = any(first_word in section.model_fields for section in sections)
        return f"{key}{'.' if begins_with_key else ': '}{message}{n_more}"
    if first["type"] == "value_error":
        return f"{message}{n_more}"
    if first["type"].startswith("union_tag"):
        choices = first.get("ctx", {}).get("expected_tags", "")
        return f"{key}.name: unknown or missing; choose one of {choices}{n_more}"
    text = repr(value)
    text = f"{text[:80]}…" if len(text) > 100 else text
    if list_sections(section, path[-1]) or first["type"] == "model_type":
        message = "this is a section"
    elif first["type"] in ("list_type", "tuple_type"):
        message = "this is a list"
    elif first["type"] == "dict_type":
        return f"{key} = {text}: this is a table; for example {key} = {{ NAME = {text} }}{n_more}"
    elif first["type"] == "missing":
        message = "has too few elements"
    return f"{key} = {text}: {message[0].lower()}{message[1:]}{_give_example(section, path)}{n_more}"


def suggest_keys(key: str, known_keys: Sequence[str], config_class: type[BaseModel]) -> str:
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
