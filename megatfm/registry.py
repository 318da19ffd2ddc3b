"""Parts by name. A package named in a config's `plugins` adds its own with the same decorator."""

import difflib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from megatfm.errors import UsageError

Part = TypeVar("Part")

SHORTEST = 3
"""Fewer letters say nothing by being the beginning of a word."""


class Registry(Generic[Part]):
    """A table `name -> part` of one kind, e.g. `NORMS = Registry[type[nn.Module]]("norm")`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Decorator that enters a part. Raises UsageError when the name is taken by another part."""

        def enter(part: Part) -> Part:
            if self._parts.setdefault(name, part) is not part:
                raise UsageError(f"{self.kind} {name!r} is registered twice: give one of them another name")
            return part

        return enter

    def get(self, name: str) -> Part:
        """The part of that name. Raises UsageError that lists the names there are."""
        if name not in self._parts:
            raise UsageError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self._parts)}; there are: {', '.join(self.names())}"
            )
        return self._parts[name]

    def names(self) -> list[str]:
        """All names entered so far, sorted, for messages."""
        return sorted(self._parts)


def refuse_repeats(overrides: Sequence[str]) -> None:
    """Raise a UsageError for a key that a user gives twice: which of the two is meant can't be known."""
    first: dict[str, str] = {}
    for override in overrides:
        key = override.partition("=")[0].strip().removeprefix("~")
        if key in first:
            raise UsageError(
                f"{key} is given twice, by {first[key]!r} and {override!r}: leave one of them out"
            )
        first[key] = override


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` when a known word is near, else an empty string."""
    suggestion = _closest(word, list(known))
    return f" (did you mean {suggestion!r}?)" if suggestion else ""


def _closest(word: str, known: Sequence[str]) -> str | None:
    """Near is what differs in signs and capitals alone, begins as the word does, begins it, or is spelled almost so."""
    bare = {name: _letters(name) for name in known}
    letters = _letters(word)
    if len(letters) >= SHORTEST:
        longer = [name for name in known if bare[name].startswith(letters)]
        shorter = [name for name in known if len(bare[name]) >= SHORTEST and letters.startswith(bare[name])]
        if longer or shorter:
            return min(longer, key=lambda name: len(bare[name])) if longer else max(shorter, key=len)
    matches = difflib.get_close_matches(word, known, n=1)
    return matches[0] if matches else None


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def import_plugins(packages: Iterable[str]) -> None:
    """Import each package of a config's `plugins`, so that its parts are registered; the current directory's, too.

    Raises UsageError that names the package, and where its code stopped, when it can't be imported.
    """
    for package in packages:
        add_plugin_folders([package], [Path.cwd()])
        try:
            importlib.import_module(package)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            if isinstance(error, ImportError) and _place(error) is None:
                raise UsageError(
                    f"plugins: can't import {package!r} ({error}): put it beside the config or into the current "
                    "directory, install it, or put its folder on PYTHONPATH"
                ) from error
            raise UsageError(
                f"plugins: {package!r} stopped at {_place(error) or 'its first line'} with {type(error).__name__}: "
                f"{error}: mend it there"
            ) from error


def _place(error: BaseException) -> str | None:
    """File and line at which the code of a package raised an error; None where importlib itself did."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else None


def import_foreign_plugins(packages: Iterable[str], source: str | Path, *, trusted: bool) -> None:
    """Import the packages that the config of a run or a checkpoint names, which may be third-party code.

    Those that are imported already do no more. Raises UsageError that names the others unless `trusted`.
    """
    names = list(packages)
    check_foreign_plugins(names, source, trusted=trusted)
    import_plugins(names)


def check_foreign_plugins(names: Iterable[str], source: str | Path, *, trusted: bool) -> None:
    """Raise a UsageError that names plugins which `import_foreign_plugins` would refuse."""
    if not trusted and (foreign := [name for name in names if name not in sys.modules]):
        raise UsageError(
            f"{source}: its config names plugins, whose code would run: {', '.join(foreign)}: if you trust them, give "
            "--trust-plugins (in Python trust_plugins=True), or name them yourself (plugins=…, in Python import)"
        )


def add_plugin_folders(packages: Iterable[str], folders: Sequence[Path]) -> None:
    """Make packages importable that are in one of these folders, the first that has it, and nowhere else.

    What is installed, or on PYTHONPATH, is found before. A folder comes last on the path, so that it hides nothing.
    """
    for name in {package.partition(".")[0] for package in packages}:
        if not name or name in sys.modules or importlib.util.find_spec(name) is not None:
            continue
        exists = (
            folder for folder in folders if (folder / f"{name}.py").is_file() or (folder / name).is_dir()
        )
        if (folder := next(exists, None)) is not None:
            sys.path.append(str(folder.resolve()))
            importlib.invalidate_caches()
