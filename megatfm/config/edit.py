"""Changes to a config from the command line: `key=value`, `key=` and `~key`, before types and ranges are looked at."""

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatfm.config.base import FromCommandLine, name_of, value_type, variants_of
from megatfm.errors import UsageError

CORPUS = "data.corpus"
"""Stands for three keys: the parts of a corpus as `megatfm prep` makes it."""


def apply_overrides(kind: type[BaseModel], values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides to the nested tables of a config, in their order. Raises UsageError.

    `key=value` sets; the value is TOML, or a plain string. `key=` and `~key` take a key or a section out, so that its
    default holds. Another `name` of a section takes out what the file says there and only the section of the old name
    knows. `data.corpus=DIR` sets the training and validation corpus and the tokenizer.
    """
    given = {override.partition("=")[0].strip() for override in overrides}
    for override in overrides:
        key, equals, text = override.partition("=")
        key, text = key.strip(), text.strip()
        if key.startswith("~") and not equals:
            key, equals = key[1:], "="
        parts = key.split(".")
        if not equals or not all(parts):
            raise UsageError(f"override {override!r}: expected key=value, for example train.steps=100")
        if key == CORPUS and text:
            _set_corpus(values, override, text)
            continue
        table = _table(values, parts[:-1], override)
        if not text:
            table.pop(parts[-1], None)
            continue
        value = _parse(override, text)
        if not isinstance(value, str | list | dict) and _is_text(type_of(kind, values, parts)):
            value = FromCommandLine(text)
        if parts[-1] == "name" and len(parts) > 1:
            _drop_stale_options(kind, values, parts[:-1], value, given)
        table[parts[-1]] = value


def let_vocabulary_follow(values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Another tokenizer than a preset's brings its own size, unless `model.vocab_size` is given as well."""
    given = {override.partition("=")[0].strip() for override in overrides}
    model = values.get("model")
    if given & {CORPUS, "data.tokenizer"} and "model.vocab_size" not in given and isinstance(model, dict):
        model.pop("vocab_size", None)


def _set_corpus(values: dict[str, Any], override: str, folder: str) -> None:
    data = _table(values, ["data"], override)
    for key in ("mixture", "mixture_changes"):
        data.pop(key, None)
    parent = folder.rstrip("/")  # S3 takes c//train for another key than c/train
    data["train"] = FromCommandLine(f"{parent}/train")
    data["validation"] = {"validation": FromCommandLine(f"{parent}/validation")}
    data["tokenizer"] = FromCommandLine(folder)


def _table(values: dict[str, Any], parts: Sequence[str], override: str) -> dict[str, Any]:
    table = values
    for part in parts:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"override {override!r}: {part!r} is a value in this config, not a section")
    return table


def _drop_stale_options(
    kind: type[BaseModel], root: Mapping[str, Any], parts: Sequence[str], name: Any, given: set[str]
) -> None:
    """Of a section that gets another name: take out what only the one of the old name has, unless it is given, too."""
    table: Any = root
    for part in parts:
        table = table[part]
    options = variants_of(type_of(kind, root, parts))
    by_name = {name_of(option): option for option in options}
    old = by_name.get(table.get("name", name_of(options[0]) if options else None))
    new = by_name.get(name, by_name.get(PydanticUndefined))  # a plugin's
    if old is None or new is None or old is new:
        return
    for key in old.model_fields.keys() - new.model_fields.keys():
        if ".".join([*parts, key]) not in given:
            table.pop(key, None)


def type_of(kind: type[BaseModel], values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The type of what a config has at a path, through the variants that its values name; None where no key is."""
    annotation: Any = kind
    given: Any = values
    for part in path:
        if options := variants_of(annotation):
            named = given.get("name", name_of(options[0])) if isinstance(given, Mapping) else None
            undefined = next(
                (option for option in options if name_of(option) is PydanticUndefined), options[0]
            )
            section = next((option for option in options if name_of(option) == named), undefined)
            field = section.model_fields.get(part)
            annotation = field.annotation if field else None
        else:
            annotation = value_type(annotation)
        given = given.get(part) if isinstance(given, Mapping) else None
    return annotation


def _is_text(annotation: Any) -> bool:
    """Tell fields that hold a string and nothing else, or are left out."""
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(_is_text(part) or part is type(None) for part in get_args(annotation))
    return annotation is str


def sections_of(section: type[BaseModel] | None, key: str) -> list[type[BaseModel]]:
    """The section classes that a field of `section` may hold."""
    field = section.model_fields.get(key) if section else None
    return variants_of(field.annotation) if field else []


def _parse(override: str, text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return FromCommandLine(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"override {override[:40]}…: {error}") from None
    return FromCommandLine(text) if isinstance(value, date | time) else _from_command_line(value)


def _from_command_line(value: Any) -> Any:
    """Mark the strings of a value, those inside tables and lists too."""
    if isinstance(value, Mapping):
        return {key: _from_command_line(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_command_line(item) for item in value]
    return FromCommandLine(value) if isinstance(value, str) else value
