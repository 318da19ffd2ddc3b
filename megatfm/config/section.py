"""The base class of config sections: frozen, typed, no unknown keys; paths relative to their file."""

import ast
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isqrt
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticUndefined

from megatfm.config.marked_strings import FromCommandLine, FromFile
from megatfm.errors import UsageError

Fraction = Annotated[float, Field(ge=0, le=1)]
DropProbability = Annotated[float, Field(ge=0, le=1 - 2**-16)]
"""A drop probability, in steps of 1/65,536 (`megatfm.ops.keyed_random`), below 1."""
MAX_WIDTH, MAX_LAYERS, MAX_LENGTH = 2**24, 2**14, 2**31
"""Bounds of a model's sizes: far above any ever trained, far below what hangs or overflows."""
MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux's file systems (NAME_MAX)."""
VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
"""A variable of the environment, as a shell writes it."""


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    small_divisors = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small_divisors, *(number // divisor for divisor in small_divisors)})


def find_nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of a number nearest to `target`; the smaller of two."""
    return min(list_divisors(number), key=lambda divisor: (abs(divisor - target), divisor))


class LacksOptionError(UsageError, AttributeError):
    """Raised when a part reads a key that its section lacks; an AttributeError, so that `getattr(…, default)` works."""


class Section(BaseModel):
    """One section of a config file: immutable, and every key is known."""

    # Validators are built at first use: most commands use few sections, and start up to a fifth faster.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def read_field_docs(cls) -> dict[str, str]:
        """Return key → the docstring below it. Read from the source on demand; pydantic would do so at every start."""
        docs: dict[str, str] = {}
        for section in reversed(cls.__mro__[: cls.__mro__.index(Section)]):
            try:
                (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
            except (OSError, TypeError):  # a plugin without a source file
                continue
            for key, text in pairwise(getattr(body, "body", ())):
                match key, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                        docs[name] = inspect.cleandoc(doc)
        return docs

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        keys, meanings = handler.resolve_ref_schema(schema).get("properties", {}), cls.read_field_docs()
        for key in keys.keys() & meanings.keys():
            keys[key].setdefault("description", meanings[key])
        return schema

    @model_validator(mode="before")
    @classmethod
    def _reject_bool_as_number(cls, values: Any) -> Any:
        """Refuse a bool for a number, as in `checkpoint.every = true`: to Python, true is 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if field and (type_name := _find_bool_as_number(value, field.annotation)):
                raise ValueError(f"{key} = {json.dumps(value)}: {type_name}")
        return values

    @model_validator(mode="before")
    @classmethod
    def _split_word_list(cls, values: Any) -> Any:
        """Split `wandb,tensorboard`, and `[wandb]` whose quotes a shell removed, into lists of words."""
        if not isinstance(values, dict):
            return values
        words = {
            key: [FromCommandLine(word) for word in split_words(value)]
            for key, value in values.items()
            if isinstance(value, FromCommandLine) and _is_list_of_words(cls, key)
        }
        return {**values, **words}

    @property
    def model_extra(self) -> dict[str, Any] | None:
        """A plugin's own keys, all of which count as read."""
        get_keys_read(self).update(self.__pydantic_extra__ or ())
        return self.__pydantic_extra__

    if not TYPE_CHECKING:  # else mypy accepts every attribute

        def __getattr__(self, key: str) -> Any:
            """Return a plugin's key. Raises LacksOptionError for a key that a part's section lacks."""
            is_option = not key.startswith("_") and "name" in type(self).model_fields
            if is_option:
                get_keys_read(self).add(key)
            try:
                return super().__getattr__(key)
            except AttributeError:
                if not is_option:
                    raise
                name, is_plugin = self.name, type(self).model_config.get("extra") == "allow"
                out = f"give it {key}" if is_plugin else "choose another part"
                raise LacksOptionError(
                    f"a section with name = {name!r} lacks the key {key!r}, which a part reads: {out}"
                ) from None

    @classmethod
    def from_dotted(cls, keys: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Build from dotted keys, as on the command line: `from_dotted({"d_model": 64, "attention.n_heads": 4})`."""
        return cls.model_validate(unflatten({**(keys or {}), **more}))

    def with_changes(self, keys: Mapping[str, Any]) -> Self:
        """Return a validated copy with new values of dotted keys.

        A dotted key changes that key alone: `data.validation.code` adds a corpus, while `data.validation` replaces all
        of them. Under a new `name`, a section keeps the options that the new variant also has.
        """
        return type(self).model_validate(merge_into_section(self, keys))


_keys_read: dict[tuple[type[Section], str], set[str]] = {}
"""Class and name of a section → keys that parts asked it for in this process: its copies are read by the same part."""


def get_keys_read(section: Section) -> set[str]:
    """Return the keys that parts have asked sections of this class and name for."""
    return _keys_read.setdefault((type(section), str(getattr(section, "name", ""))), set())


def merge_into_section(section: Section, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's values with changes; changed sections below it become tables."""
    values: dict[str, Any] = {key: getattr(section, key) for key in type(section).model_fields}
    values |= section.__pydantic_extra__ or {}  # a plugin's keys
    annotations = {key: field.annotation for key, field in type(section).model_fields.items()}
    return _merge_into_table(values, keys, annotations)


def _merge_into_table(
    table: Mapping[str, Any], keys: Mapping[str, Any], annotations: Mapping[str, Any]
) -> dict[str, Any]:
    values, changes_by_key = dict(table), dict[str, dict[str, Any]]()
    for path, change in keys.items():
        key, _, inner_path = path.partition(".")
        if inner_path:
            changes_by_key.setdefault(key, {})[inner_path] = change
        elif isinstance(change, Mapping) and isinstance(values.get(key), Section):
            changes_by_key.setdefault(key, {}).update(change)
        else:
            values[key] = unflatten(change) if isinstance(change, Mapping) else change
    for key, changes in changes_by_key.items():
        old, annotation = values.get(key), annotations.get(key)
        if isinstance(old, Section):
            values[key] = _merge_into_variant(old, changes, list_variants(annotation))
        elif isinstance(old, Mapping):
            inner = dict.fromkeys([*old, *(name.partition(".")[0] for name in changes)], get_value_type(annotation))
            values[key] = _merge_into_table(old, changes, inner)
        else:
            values[key] = unflatten(changes)
    return values


def _merge_into_variant(
    section: Section, changes: Mapping[str, Any], variants: Sequence[type[BaseModel]]
) -> dict[str, Any]:
    """Return a section's values with changes; under another name, the values that the new variant also has."""
    old_name = getattr(section, "name", None)
    name = changes.get("name", old_name)
    if name == old_name:
        return merge_into_section(section, changes)
    variant = next((option for option in variants if get_variant_name(option) in (name, PydanticUndefined)), None)
    common = (variant.model_fields.keys() & type(section).model_fields.keys()) - {"name"} if variant else ()
    common_values = {key: getattr(section, key) for key in common}
    annotations = {key: field.annotation for key, field in variant.model_fields.items()} if variant else {}
    return _merge_into_table(common_values, changes, annotations)


def list_variants(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes in a field's type, through Optional, Union and Annotated."""
    return [kind for kind in _list_types(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def is_text(annotation: Any) -> bool:
    """Return whether a field's type is a string, maybe None."""
    return all(kind in (str, type(None)) for kind in _list_types(annotation))


def _list_types(annotation: Any) -> list[Any]:
    """Return the types in a union, and the values of a Literal."""
    annotation = _strip_metadata(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _list_types(part)]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else [annotation]


def _strip_metadata(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def list_sections(section: type[BaseModel] | None, key: str) -> list[type[BaseModel]]:
    """Return the section classes of a field of `section`."""
    field = section.model_fields.get(key) if section else None
    return list_variants(field.annotation) if field else []


def get_value_type(annotation: Any) -> Any:
    """Return the type of a table's values, from the table's type; None if it is no dict."""
    annotation = _strip_metadata(annotation)
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def get_item_type(annotation: Any) -> Any:
    """Return the type of a table's values or a list's items, from the type of the table or list; None for others."""
    annotation = _strip_metadata(annotation)
    is_list = get_origin(annotation) is list or (get_origin(annotation) is tuple and get_args(annotation)[1:] == (...,))
    return get_args(annotation)[0] if is_list else get_value_type(annotation)


def get_variant_name(section: type[BaseModel]) -> object:
    """Return the value of `name` that chooses a section class."""
    if (field := section.model_fields.get("name")) is None:
        return None
    return next(iter(get_args(field.annotation)), field.default) if field.is_required() else field.default


def make_usage_error(subject: str, error: ValidationError) -> UsageError:
    """Return the first error of a config that was computed, not read from a file, as `subject: key: reason`."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return UsageError(f"{subject}: {f'{key}: ' if key else ''}{reason}")


def unflatten(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Nest tables by the dots in keys."""
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        first, _, inner_key = key.partition(".")
        if inner_key or isinstance(value, Mapping):
            inner = tables.get(first)
            nested = unflatten({inner_key: value} if inner_key else value)
            tables[first] = deep_merge(inner, nested) if isinstance(inner, dict) else nested
        else:
            tables[first] = value
    return tables


def deep_merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merge tables key by key at every depth; where both have a value, `override` wins."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


AnySection = TypeVar("AnySection", bound=Section)


def require_variant(section: Section, kind: type[AnySection], key: str) -> AnySection:
    """Return a section as an instance of `kind`. Raises UsageError if it is another variant. key: of the section."""
    if isinstance(section, kind):
        return section
    name = kind.model_fields["name"].default
    reason = f": this needs {name!r}" if isinstance(name, str) else " lacks the options that this needs"
    raise UsageError(f"{key}.name = {getattr(section, 'name', None)!r}{reason}")


def split_words(text: str) -> list[str]:
    """Return the words of an unquoted list such as `[a, b]`. Brackets within a word, as in `layers.[0,1]`, stay."""
    depths = list(accumulate((char == "[") - (char == "]") for char in text))
    if text.startswith("[") and depths[-1] == 0 and depths.index(0) == len(text) - 1:
        return split_words(text[1:-1])
    commas = [i for i, (char, depth) in enumerate(zip(text, depths, strict=True)) if char == "," and depth <= 0]
    words = [text[start + 1 : end].strip() for start, end in pairwise([-1, *commas, len(text)])]
    return [word for word in words if word]


def _find_bool_as_number(value: Any, annotation: Any) -> str:
    """Return what to write in place of a bool where a number belongs, also in lists and tables; "" if all is well."""
    if not isinstance(value, bool | list | tuple | Mapping):
        return ""  # nearly every value; a deep model's layers validate thousands
    kinds = _list_types(annotation)
    if isinstance(value, bool):
        numbers = [kind for kind in kinds if kind in (int, float) or type(kind) in (int, float)]
        if not numbers or any(kind is bool or isinstance(kind, bool) for kind in kinds):
            return ""
        choices = [json.dumps(number) for number in numbers if not isinstance(number, type)]
        return f"this is a number: write one{' of ' if choices else ''}{', '.join(choices)}"
    for kind in kinds:
        item_types = get_args(kind)
        if get_origin(kind) in (list, tuple) and isinstance(value, list | tuple):
            item_types = tuple(part for part in item_types if part is not Ellipsis)
            item_types += item_types[-1:] * (len(value) - len(item_types))
            faults: Iterable[str] = map(_find_bool_as_number, value, item_types)
        elif get_origin(kind) is dict and isinstance(value, Mapping):
            faults = (_find_bool_as_number(item, item_types[1]) for item in value.values())
        else:
            continue
        return next(filter(None, faults), "")
    return ""


def _is_list_of_words(section: type[BaseModel], key: str) -> bool:
    field = section.model_fields.get(key)
    annotation = field.annotation if field else None
    if get_origin(annotation) not in (list, tuple):
        return False
    first = get_args(annotation)[0]
    return str in (first, getattr(first, "__origin__", None)) or get_origin(first) is Literal


def _resolve_path(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or "://" in value:
        return value
    if not value:
        raise ValueError("an empty path: give a path, or leave the key out")
    base = None if isinstance(value, FromCommandLine) else (info.context or {}).get("base")
    base = value.folder if isinstance(value, FromFile) else base
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"{Path(value).parts[0]} is no user of this machine: write the home folder's path") from None
    if "\0" in value or any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in path.parts):
        raise ValueError(f"{value!r:.80} is no path: a name in it is too long, or has a null character")
    resolved = os.path.normpath(Path(base or Path.cwd()) / path)
    # A folder may have such a name, and a path below it, in a run's config, need not exist yet.
    variable_paths = [path for path in (Path(resolved), *Path(resolved).parents) if VARIABLE.search(path.name)]
    if (variable := VARIABLE.search(value)) and not all(map(os.path.lexists, variable_paths)):
        raise ValueError(
            f"{value!r}: a config knows no variables of the environment: write what {variable[0]} stands for, or set "
            "the key on the command line, where the shell does that"
        )
    return resolved


PathStr = Annotated[str, BeforeValidator(_resolve_path)]
"""A path, made absolute on loading: relative to the config file, or, from the command line or a preset, to the current
directory. URLs are unchanged."""


def check_path(path: Path) -> Path:
    """Return a run directory's path. Raises UsageError if it is no UTF-8, the encoding of logs and configs."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{str(path)!r}: a run directory's path must be UTF-8: choose another") from None
    return path
