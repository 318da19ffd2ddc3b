"""Strings of a config that know where they come from, so that paths among them resolve from there."""

from pathlib import Path
from typing import Self


class FromCommandLine(str):
    """A value given as `key=value`: when it turns out to be a path, it is relative to the current directory."""


class FromFile(str):
    """A value of a file that another one extends: when it turns out to be a path, it is relative to its own file."""

    folder: Path

    def __new__(cls, value: str, folder: Path) -> Self:
        text = super().__new__(cls, value)
        text.folder = folder
        return text

    def __getnewargs__(self) -> tuple[str, Path]:  # type: ignore[override]
        return str(self), self.folder
