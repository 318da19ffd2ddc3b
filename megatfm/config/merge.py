"""Merge the tables of config files that extend one another, and find the type at a path of a config."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatfm.config.section import name_of, value_type, variants_of


def merge(annotation: Any, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base's table of a section with changes. annotation: the section's type.

    Sections merge at every depth. Values, lists and tables with the user's own names, such as `data.validation`,
    replace the base's. Under another `name`, keys that only the base's variant has are dropped.
    """
    options = variants_of(annotation)
    merged = dict(base)
    if "name" in changes:
        drop_stale_keys(options, merged, changes["name"])
    section = choose_variant(options, changes.get("name", merged.get("name")))
    for key, value in changes.items():
        field = section.model_fields.get(key) if section else None
        base_value = merged.get(key)
        is_section = field is None or variants_of(field.annotation)  # no field: a plugin's key
        if isinstance(value, Mapping):
            base_table = base_value if is_section and isinstance(base_value, Mapping) else {}
            value = merge(field.annotation if field else None, base_table, value)
        merged[key] = value
    return merged


def drop_stale_keys(
    options: Sequence[type[BaseModel]], table: dict[str, Any], name: Any, keep: Collection[str] = ()
) -> None:
    """Remove the keys that only the old variant of a section has, when its name changes. keep: keys to keep."""
    old_name = table.get("name", name_of(options[0]) if options else None)
    variant_by_name = {name_of(option): option for option in options}
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
    variant_by_name = {name_of(option): option for option in options}
    type_name = name if isinstance(name, str) else name_of(options[0])
    return variant_by_name.get(type_name, variant_by_name.get(PydanticUndefined, options[0]))


def type_of(config_class: type[BaseModel], values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the type at a path of a config, by the variants that the config names; None if there is no such key."""
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
