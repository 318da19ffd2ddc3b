"""The settings of a run: as sections for people, those that differ from the defaults apart."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config

Settings = list[tuple[str, list[tuple[str, str]]]]


def sections(config: Mapping[str, Any]) -> Settings:
    """The config as titled lists of keys and values; keys outside a section come first."""
    alone = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    return [("run", list(flatten(alone))), *((key, list(flatten(table))) for key, table in tables.items())]


def non_default_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of a resolved config differs from the defaults; None where this version can't read it.

    A section that differs keeps its `name`, without which its keys say little.
    """
    try:
        read = Config.model_validate(config)
    except ValidationError:
        return None
    kept = read.model_dump(mode="json", exclude_defaults=True)
    _restore_names(kept, read.model_dump(mode="json"))
    return kept


def _restore_names(kept: dict[str, Any], whole: Mapping[str, Any]) -> None:
    for key, value in kept.items():
        if isinstance(value, dict) and isinstance(whole[key], Mapping):
            _restore_names(value, whole[key])
            if value and "name" in whole[key] and "name" not in value:
                kept[key] = {"name": whole[key]["name"], **value}


def flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Dotted keys and readable values of nested tables."""
    return ((key, text(value)) for key, value in leaves(table))


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def text(value: Any) -> str:
    """A setting as people read it; of numbers every digit, so that unlike ones look unlike."""
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, int):
        return f"{value:,}"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
