"""Strings of a config with their origin, relative to which paths resolve."""

from pathlib import Path
from typing import Self


class FromCommandLine(str):
    """A value of a `key=value` override. As a path, it is relative to the current directory."""


class FromFile(str):
    """A value of a file that another one extends. As a path, it is relative to the folder of its file."""

    folder: Path

    def __new__(cls, value: str, folder: Path) -> Self:
        text = super().__new__(cls, value)
        text.folder = folder
        return text

    def __getnewargs__(self) -> tuple[str, Path]:  # type: ignore[override]
        return str(self), self.folder
