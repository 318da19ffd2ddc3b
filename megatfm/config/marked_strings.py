"""Strings of a config with their origin, relative to which paths resolve."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self


class FromCommandLine(str):
    """A value of a `key=value` override; a path is relative to the current directory."""


class FromFile(str):
    """A value of a file that another one extends; a path is relative to the folder of its file."""

    folder: Path

    def __new__(cls, value: str, folder: Path) -> Self:
        text = super().__new__(cls, value)
        text.folder = folder
        return text

    def __getnewargs__(self) -> tuple[str, Path]:  # type: ignore[override]
        return str(self), self.folder


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with its strings changed, also inside tables and lists."""
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
