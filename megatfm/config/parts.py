"""Parts that a config names: sections chosen by name, names that nothing registers, and keys that no part reads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema
from pydantic_core.core_schema import with_info_before_validator_function

from megatfm.config.section import Section, get_keys_read, get_value_type, list_variants
from megatfm.registry import did_you_mean, list_plugin_names


class ByName:
    """Annotation of a union of sections: a table is validated as the section class of its `name`.

    The last class of the union, a plugin's, takes every other name. A table without a name is the first class; with
    `noun`, it is an error that names `noun`.
    """

    def __init__(self, noun: str = "") -> None:
        self.noun = noun

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        *builtin_variants, plugin = list_variants(source)
        sections = {get_args(section.model_fields["name"].annotation)[0]: section for section in builtin_variants}

        def choose(value: Any, info: ValidationInfo) -> Any:
            if isinstance(value, (*builtin_variants, plugin)):
                return value
            name = value.get("name") if isinstance(value, Mapping) else None
            if self.noun and (not isinstance(name, str) or not name):
                raise ValueError(
                    f"{self.noun} needs a name: {', '.join(sorted(sections))}, or one that a plugin registers"
                )
            if not name:
                return builtin_variants[0].model_validate(value, context=info.context)
            section = sections.get(name, plugin) if isinstance(name, str) else plugin
            return section.model_validate(value, context=info.context)

        return with_info_before_validator_function(choose, handler(source))


def expand_name(section: Any) -> Any:
    """Expand a section that is given by its name alone to a table."""
    return {"name": str(section)} if isinstance(section, str) else section


class PartName(NamedTuple):
    """Annotation of a key whose value is the name of a registered part, or a list of such names.

    kind: that of the part's `Registry`. names: megatfm's own parts; a plugin's section leaves them out, as the union to
    which it belongs has them. suggest: returns the name that a user of another program may mean, or the given one.
    """

    kind: str
    names: tuple[str, ...] = ()
    suggest: Callable[[str], str] = str


def iter_part_names(
    section: Section, path: str = "", siblings: Sequence[str] = ()
) -> Iterator[tuple[str, str, PartName]]:
    """Yield key, value and registered names of each `PartName` in a section and below it.

    siblings: names of the variants of the section's union.
    """
    for key, part, variants in _list_fields(type(section)):
        value = getattr(section, key)
        if part:
            known = part if part.names else part._replace(names=tuple(siblings))
            yield from ((f"{path}{key}", name, known) for name in ([value] if isinstance(value, str) else value or ()))
        for place, inner in _iter_inner_sections(f"{path}{key}", value):
            yield from iter_part_names(inner, f"{place}.", variants)


@cache
def _list_fields(section: type[Section]) -> list[tuple[str, PartName | None, list[str]]]:
    """Return key, `PartName` and names of the variants of each field."""
    return [
        (
            key,
            next((item for item in field.metadata if isinstance(item, PartName)), None),
            list_variant_names(field.annotation),
        )
        for key, field in section.model_fields.items()
    ]


def explain_unknown_name(names: Iterable[tuple[str, str, PartName]], plugins: Sequence[str]) -> str | None:
    """Return an error for the first name that neither megatfm nor an imported plugin registers; None without one.

    names: of `iter_part_names`. plugins: packages that the config names.
    """
    for key, name, part in names:
        known = [*part.names, *list_plugin_names(part.kind)]
        if name not in known:
            package = f", where {', '.join(plugins)} is named" if plugins else ""
            return (
                f"{key} = {name!r}: unknown{did_you_mean(part.suggest(name), known)}; there are: {', '.join(known)}; "
                f"others need the package that registers them in plugins{package}"
            )
    return None


def find_unread_key(section: Section, path: str = "") -> str | None:
    """Return an error for a key of a plugin's section that no part has asked for in this process; None without one."""
    asked = get_keys_read(section)
    for key in section.__pydantic_extra__ or ():
        if key not in asked:
            name = getattr(section, "name", None)
            return (
                f"{path}{key}: nothing reads this key of name = {name!r}{did_you_mean(key, sorted(asked))}: correct "
                "it or leave it out; a plugin's part reads its keys when it is made"
            )
    inner = (
        find_unread_key(entry, f"{place}.")
        for key in type(section).model_fields
        for place, entry in _iter_inner_sections(f"{path}{key}", getattr(section, key))
    )
    return next(filter(None, inner), None)


def list_variant_names(annotation: Any) -> list[str]:
    """Return the names of the section classes in a field's type, also of a table or a list, without plugins'."""
    if get_origin(annotation) in (list, tuple):
        annotation = get_args(annotation)[0]
    fields = (section.model_fields.get("name") for section in list_variants(get_value_type(annotation) or annotation))
    names = (next(iter(get_args(field.annotation)), field.default) for field in fields if field is not None)
    return [name for name in names if isinstance(name, str)]


def _iter_inner_sections(path: str, value: Any) -> Iterator[tuple[str, Section]]:
    """Yield path and value of the section, or of the sections in the list or table, that a key holds."""
    entries = {path: value}
    if isinstance(value, Mapping):
        entries = {f"{path}.{name}": entry for name, entry in value.items()}
    elif isinstance(value, list | tuple):
        entries = {f"{path}[{number}]": entry for number, entry in enumerate(value)}
    yield from ((place, entry) for place, entry in entries.items() if isinstance(entry, Section))
