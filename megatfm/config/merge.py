"""Merging the tables of config files that extend one another, and the types of what a config has at a path."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatfm.config.section import name_of, value_type, variants_of


def merge(annotation: Any, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the table of a section into its base's, given the section's type.

    Sections merge at every depth; all else replaces the base's: values, lists, and tables of names that a user chooses,
    such as `data.validation`. Under another `name`, what only the base's variant knows is left out.
    """
    options = variants_of(annotation)
    merged = dict(base)
    if "name" in changes:
        drop_stale_keys(options, merged, changes["name"])
    section = choose_variant(options, changes.get("name", merged.get("name")))
    for key, value in changes.items():
        field = section.model_fields.get(key) if section else None
        old = merged.get(key)
        is_section = field is None or variants_of(field.annotation)  # without a field: a plugin's own
        if isinstance(value, Mapping):
            below = old if is_section and isinstance(old, Mapping) else {}
            value = merge(field.annotation if field else None, below, value)
        merged[key] = value
    return merged


def drop_stale_keys(
    options: Sequence[type[BaseModel]], table: dict[str, Any], name: Any, keep: Collection[str] = ()
) -> None:
    """Take out of a section that gets another name what only its old variant knows, but for the keys to keep."""
    old_name = table.get("name", name_of(options[0]) if options else None)
    option_of = {name_of(option): option for option in options}
    plugin = option_of.get(PydanticUndefined)
    if old_name == name or not (isinstance(old_name, str) and isinstance(name, str)):
        return
    old, new = option_of.get(old_name, plugin), option_of.get(name, plugin)
    if old is None or new is None:
        return
    stale = (table if old is plugin else old.model_fields).keys() - new.model_fields.keys() - {*keep}
    for key in stale:
        table.pop(key, None)


def choose_variant(options: Sequence[type[BaseModel]], name: Any) -> type[BaseModel] | None:
    """Return the section class of a name: the first without one, a plugin's for an unknown one; None of no classes."""
    if not options:
        return None
    option_of = {name_of(option): option for option in options}
    type_name = name if isinstance(name, str) else name_of(options[0])
    return option_of.get(type_name, option_of.get(PydanticUndefined, options[0]))


def type_of(config_class: type[BaseModel], values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the type of what a config has at a path, through the variants that it names; None where no key is."""
    annotation: Any = config_class
    value: Any = values
    for part in path:
        if options := variants_of(annotation):
            section = choose_variant(options, value.get("name") if isinstance(value, Mapping) else None)
            field = section.model_fields.get(part) if section else None
            annotation = field.annotation if field else None
        else:
            annotation = value_type(annotation)
        value = value.get(part) if isinstance(value, Mapping) else None
    return annotation
