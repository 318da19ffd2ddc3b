"""What every config section shares: frozen, typed, no unknown keys; and paths that know where they came from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, model_validator


class Section(BaseModel):
    """One section of a config file: immutable, and every key is known."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

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


class FromCommandLine(str):
    """A value given as `key=value`: when it turns out to be a path, it is relative to the current directory."""


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
