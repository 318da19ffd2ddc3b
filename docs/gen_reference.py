"""MkDocs hook: the configuration reference, made from the config classes whenever the docs are built."""

import json
import re
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatfm.config import Config
from megatfm.config.prep import PrepConfig
from megatfm.config.section import PathStr, Section

INTRODUCTION = (
    "Any key can be set in the file, or on the command line as `section.key=value`. A key that is not listed here is "
    "refused. Relative paths in a file are relative to that file; on the command line and in presets that ship with "
    "megatfm, to the current directory."
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for uri, title, kind in (
        ("reference/config.md", "Training config", Config),
        ("reference/prep.md", "Prep config", PrepConfig),
    ):
        files.remove(files.src_uris[uri])  # what stands there in the repository
        files.append(File.generated(config, uri, content=page(title, kind)))
    return files


def page(title: str, kind: type[Section]) -> str:
    """One config class as Markdown: a table for the keys outside a section, then one for each section."""
    parts = [f"# {title}", str(kind.__doc__), INTRODUCTION]
    places: dict[tuple[type[Section], ...], str] = {}
    parts.append(table(kind, [name for name, field in kind.model_fields.items() if not sections(field)]))
    for name, field in kind.model_fields.items():
        title = f"[[{name}]]" if get_origin(field.annotation) is tuple else f"[{name}]"
        for section in sections(field):
            # Every key each time: a key that one section has and another has not would else look alike.
            parts.append(f"## `{title}`{variant(section) if len(sections(field)) > 1 else ''}")
            parts += [
                str(section.__doc__),
                table(section, section.model_fields),
                *inside(name, section, places),
            ]
    return "\n\n".join(parts) + "\n"


def inside(place: str, section: type[Section], places: dict[tuple[type[Section], ...], str]) -> Iterator[str]:
    """The sections in a section, however deep; places: where those of several variants are, which come only once."""
    for key, field in section.model_fields.items():
        kinds = sections(field)
        name = f"{place}.{key}"
        if get_origin(field.annotation) in (list, dict):
            name += "[]" if get_origin(field.annotation) is list else ".NAME"
        if tuple(kinds) in places:
            first = places[tuple(kinds)]
            where = "above" if first == name else f"those of `{first}`"
            yield f"The sections of `{name}` are [{where}](#{anchor(first)})."
            continue
        if len(kinds) > 1:
            places[tuple(kinds)] = name
        for number, kind in enumerate(kinds):
            mark = f" {{#{anchor(name)}}}" if len(kinds) > 1 and not number else ""
            yield f"### `{name}`{variant(kind) if len(kinds) > 1 else ''}{mark}"
            yield str(kind.__doc__)
            yield table(kind, kind.model_fields)
            yield from inside(name, kind, places)


def anchor(place: str) -> str:
    """The anchor of the first variant at a place."""
    return re.sub(r"\W+", "-", place).strip("-").lower() + "-variants"


def variant(section: type[Section]) -> str:
    """Which of a key's sections this is."""
    field = section.model_fields["name"]
    named = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    name = named[0] if named else field.default
    return " of a plugin" if name is PydanticUndefined else f" with `name = {json.dumps(name)}`"


def sections(field: FieldInfo) -> list[type[Section]]:
    """The section classes that a field may hold."""
    return list(dict.fromkeys(_classes(field.annotation)))


def only_sections(field: FieldInfo) -> bool:
    """Whether a key is a section, told below, and no list or table of them."""
    return bool(sections(field)) and get_origin(field.annotation) not in (list, dict, tuple)


def _classes(kind: Any) -> Iterator[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    elif get_origin(kind) is not Literal:
        for part in get_args(kind):
            yield from _classes(part)


def table(section: type[Section], names: Iterable[str]) -> str:
    """Of these keys of a section."""
    rows, meanings = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"], section.read_field_docs()
    for name in names:
        field = section.model_fields[name]
        cells = (
            f"`{name}`",
            "section" if only_sections(field) else spelled(field.annotation, field.metadata),
            default(field),
            meanings.get(name, ""),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(rows)


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required" + (f", e.g. `{toml(field.examples[0])}`" if field.examples else "")
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "not set" + (f", e.g. `{toml(field.examples[0])}`" if field.examples else "")
    return f"`{toml(value)}`"


def toml(value: Any) -> str:
    """A value as it is written in TOML (numbers as Python prints them)."""
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return str(value)


def spelled(kind: Any, metadata: list[Any] = ()) -> str:  # type: ignore[assignment]
    """A type as a person says it: integer > 0, text, path, one of …"""
    if set(map(str, get_args(PathStr)[1:])) <= set(map(str, metadata)):
        return "path"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return spelled(arguments[0], [*metadata, *arguments[1:]])
    if origin is Literal:
        return " or ".join(f"`{toml(choice)}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(spelled(part, list(metadata)) for part in arguments if part is not NoneType)
    if origin in (list, tuple):
        return f"list of {spelled(arguments[0])}"
    if origin is dict:
        return f"table of {spelled(arguments[1])}"
    names = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}
    return " ".join([names.get(kind, getattr(kind, "__name__", str(kind))), *bounds(metadata)])


def bounds(metadata: list[Any]) -> Iterator[str]:
    """The limits of a number, the lower first: > 0, ≤ 1."""
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        for item in metadata:
            limit = getattr(item, name, None)
            if limit is not None:
                yield f"{sign} {limit:,}" if isinstance(limit, int) else f"{sign} {limit}"
