"""What every config section shares: frozen, typed, no unknown keys; and paths that know where they came from."""

import ast
import inspect
import os
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

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

from megatfm.errors import UsageError

Rate = Annotated[float, Field(ge=0, le=1 - 2**-16)]
"""A probability of dropping something: in steps of 1/65,536 (`megatfm.ops.dropout`), of which at least one is left."""


WIDEST, DEEPEST, LONGEST = 2**24, 2**14, 2**31
"""Of a model: far above any that was ever trained, and far below what hangs or overflows where it is made."""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is nearest to another; of two, the smaller."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


class LacksOptionError(UsageError, AttributeError):
    """A part reads a key that its section has not. An AttributeError too: parts ask for keys with `getattr`."""


class Section(BaseModel):
    """One section of a config file: immutable, and every key is known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each key means: the string below it. Read from the source when it is asked for, and not, as pydantic
        would, whenever a command starts."""
        found: dict[str, str] = {}
        for section in reversed(cls.__mro__[: cls.__mro__.index(Section)]):
            try:
                (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
            except (OSError, TypeError):  # of a plugin that is no file
                continue
            for key, text in pairwise(getattr(body, "body", ())):
                match key, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(says))
                    ):
                        found[name] = inspect.cleandoc(says)
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        keys, meanings = handler.resolve_ref_schema(schema).get("properties", {}), cls.meanings()
        for key in keys.keys() & meanings.keys():
            keys[key].setdefault("description", meanings[key])
        return schema

    @model_validator(mode="before")
    @classmethod
    def _true_is_not_one(cls, values: Any) -> Any:
        """Python takes true for the number 1; whoever writes `checkpoint.every = true` means something else."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            kinds = [field.annotation, *get_args(field.annotation)] if field else []
            if isinstance(value, bool) and any(getattr(k, "__origin__", k) in (int, float) for k in kinds):
                raise ValueError(f"{key} = {str(value).lower()}: this is a number: write one")
        return values

    @model_validator(mode="before")
    @classmethod
    def _words_are_a_list(cls, values: Any) -> Any:
        """`log.sinks=wandb,tensorboard` and `[wandb]`, of which a shell has taken the quotes, mean lists of words."""
        if not isinstance(values, dict):
            return values
        words = {
            key: [FromCommandLine(word.strip()) for word in value.strip("[]").split(",") if word.strip()]
            for key, value in values.items()
            if isinstance(value, FromCommandLine) and _is_list_of_words(cls, key)
        }
        return {**values, **words}

    if not TYPE_CHECKING:  # or mypy would take every name for a key

        def __getattr__(self, key: str) -> Any:
            """Keys of a plugin's own. Raises LacksOptionError for one that the section of a part has not."""
            try:
                return super().__getattr__(key)
            except AttributeError:
                if key.startswith("_") or "name" not in type(self).model_fields:
                    raise
                name, own = self.name, type(self).model_config.get("extra") == "allow"
                out = f"give it {key}" if own else "choose another part"
                raise LacksOptionError(
                    f"a section with name = {name!r} lacks the key {key!r}, which a part reads: {out}"
                ) from None

    @classmethod
    def of(cls, keys: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """From keys with dots, as on the command line: `of({"d_model": 64, "attention.n_heads": 4})`."""
        return cls.model_validate(nested({**(keys or {}), **more}))

    def changed(self, keys: Mapping[str, Any]) -> Self:
        """A copy with other values of such keys, checked like any config.

        Under a new `name`, a section keeps the options that the new variant has as well.
        """
        values: dict[str, Any] = {key: getattr(self, key) for key in type(self).model_fields}
        values |= self.model_extra or {}  # keys of a plugin's own
        for key, value in nested(keys).items():
            part = values.get(key)
            if isinstance(part, Section) and isinstance(value, Mapping):
                renamed = value.get("name", getattr(part, "name", None)) != getattr(part, "name", None)
                values[key] = {**self._kept(key, value["name"]), **value} if renamed else part.changed(value)
            else:
                values[key] = value
        return type(self).model_validate(values)

    def _kept(self, key: str, name: str) -> dict[str, Any]:
        """The options of a section that its variant of that name has as well."""
        part = getattr(self, key)
        for variant in get_args(type(self).model_fields[key].annotation):
            if variant.model_fields["name"].default in (name, PydanticUndefined):
                known = variant.model_fields.keys() - {"name"}
                return {option: getattr(part, option) for option in known & type(part).model_fields.keys()}
        return {}


def invalid(subject: str, error: ValidationError) -> UsageError:
    """The first mistake of a config that was computed, not read from a file, as `subject: key: reason`."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return UsageError(f"{subject}: {f'{key}: ' if key else ''}{reason}")


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Tables in tables, from keys with dots."""
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        first, _, rest = key.partition(".")
        if rest or isinstance(value, Mapping):
            inner = tables.get(first)
            more = nested({rest: value} if rest else value)
            tables[first] = _merged(inner, more) if isinstance(inner, dict) else more
        else:
            tables[first] = value
    return tables


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for key, value in other.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


AnySection = TypeVar("AnySection", bound=Section)


def expect(given: Section, kind: type[AnySection], key: str) -> AnySection:
    """A section as the variant whose options a part reads. Raises UsageError where the config has another."""
    if isinstance(given, kind):
        return given
    wanted = kind.model_fields["name"].default
    raise UsageError(
        f"{key}.name = {getattr(given, 'name', None)!r}: this needs {wanted!r}"
        if isinstance(wanted, str)
        else f"{key}.name = {getattr(given, 'name', None)!r} lacks the options that this needs"
    )


class FromCommandLine(str):
    """A value given as `key=value`: when it turns out to be a path, it is relative to the current directory."""


def _is_list_of_words(section: type[BaseModel], key: str) -> bool:
    field = section.model_fields.get(key)
    annotation = field.annotation if field else None
    if get_origin(annotation) not in (list, tuple):
        return False
    first = get_args(annotation)[0]
    return str in (first, getattr(first, "__origin__", None)) or get_origin(first) is Literal


def _resolve(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or "://" in value:
        return value
    if not value:
        raise ValueError("an empty path: give a path, or leave the key out")
    base = None if isinstance(value, FromCommandLine) else (info.context or {}).get("base")
    return os.path.normpath(Path(base or Path.cwd()) / Path(value).expanduser())


PathStr = Annotated[str, BeforeValidator(_resolve)]
"""A path, made absolute on loading: relative to the config file, or to the current directory when it comes
from the command line or from a preset. URLs are left alone."""


def check_path(path: Path) -> Path:
    """A run directory as it is; raises UsageError if its name is no UTF-8, which logs and configs are written in."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{str(path)!r}: a run directory's path must be UTF-8: choose another") from None
    return path


def by_name(*known: type[Section], other: type[Section]) -> BeforeValidator:
    """Validate a table as the section whose `name` it gives, the first of them if it gives none.

    other: the section for any other name, so that a plugin's part can have keys of its own.
    """
    sections = {section.model_fields["name"].default: section for section in known}

    def choose(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, (*known, other)):
            return value
        named = (
            value.get("name", known[0].model_fields["name"].default) if isinstance(value, Mapping) else None
        )
        section = sections.get(named, other) if named else known[0]
        return section.model_validate(value, context=info.context)

    return BeforeValidator(choose)
