"""Registries of components by name, and plugins: packages of a config's `plugins`, which register more components."""

import difflib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

from megatfm.errors import UsageError

Part = TypeVar("Part")

MIN_PREFIX = 3
"""Least number of letters with which a prefix suggests a name."""


_places_of_used_parts: dict[str, str] = {}
"""Kind and name of each part of a plugin that was looked up → file and line of its registration."""
_names_of_plugins: dict[str, dict[str, None]] = {}
"""Kind of part → names that plugins registered, in their order."""
_imported_plugins: set[str] = set()
"""Top-level packages of the plugins that were imported."""


class Registry(Generic[Part]):
    """A table `name -> part` of one kind, e.g. `NORMS = Registry[type[nn.Module]]("norm")`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[str, Part] = {}
        self._places: dict[str, str] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Return a decorator that registers an object. Raises UsageError if the name is registered already."""

        def add(part: Part) -> Part:
            place = _find_registering_line()
            if self._parts.setdefault(name, part) is not part:
                first = self._places.get(name, "megatfm itself")
                raise UsageError(
                    f"{self.kind} {name!r} is registered twice, by {first} and {place or 'megatfm itself'}: "
                    "give one of them another name"
                )
            if place is not None:
                self._places[name] = place
                _names_of_plugins.setdefault(self.kind, {})[name] = None
            return part

        return add

    def get(self, name: str) -> Part:
        """Return the object of that name. Raises UsageError that lists the registered names."""
        if name not in self._parts:
            raise UsageError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self._parts)}; there are: {', '.join(self.names())}"
            )
        if name in self._places:
            _places_of_used_parts[f"{self.kind} {name!r}"] = self._places[name]
        return self._parts[name]

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._parts)


def list_plugin_names(kind: str) -> list[str]:
    """Return the names of the parts of a kind that plugins have registered so far."""
    return [*_names_of_plugins.get(kind, ())]


def refuse_repeats(overrides: Sequence[str]) -> None:
    """Raise UsageError for overrides that give the same key twice."""
    override_of_key: dict[str, str] = {}
    for override in overrides:
        key = override.partition("=")[0].strip().removeprefix("~")
        if key in override_of_key:
            raise UsageError(
                f"{key} is given twice, by {override_of_key[key]!r} and {override!r}: leave one of them out"
            )
        override_of_key[key] = override


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` if a known name is similar to the word; else an empty string."""
    suggestion = _find_closest(word, list(known))
    return f" (did you mean {suggestion!r}?)" if suggestion else ""


def _find_closest(word: str, known: Sequence[str]) -> str | None:
    """Return the most similar name: equal but for case and punctuation, a prefix or an extension, or spelled alike."""
    bare = {name: _keep_letters(name) for name in known}
    letters = _keep_letters(word)
    if len(letters) >= MIN_PREFIX:
        longer = [name for name in known if bare[name].startswith(letters)]
        shorter = [name for name in known if len(bare[name]) >= MIN_PREFIX and letters.startswith(bare[name])]
        if longer or shorter:
            return min(longer, key=lambda name: len(bare[name])) if longer else max(shorter, key=len)
    matches = difflib.get_close_matches(word, known, n=1)
    return matches[0] if matches else None


def _keep_letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def import_plugins(packages: Iterable[str]) -> None:
    """Import the packages of a config's `plugins`, so that they register their components.

    Also finds packages in the current directory. Raises UsageError that names the package, and the line at which its
    code failed.
    """
    for package in packages:
        add_plugin_folders([package], [Path.cwd()])
        _imported_plugins.add(package.partition(".")[0])
        try:
            importlib.import_module(package)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            place = _find_location(error)
            if place is None:
                raise UsageError(
                    f"plugins: can't import {package!r} ({error}): put it beside the config or into the current "
                    "directory, install it, or put its folder on PYTHONPATH"
                ) from error
            raise UsageError(
                f"plugins: {package!r} stopped at {place} with {type(error).__name__}: {error}: mend it there"
            ) from error


def _find_location(error: BaseException) -> str | None:
    """Return file and line at which a package's code raised an error; None if importlib itself raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else None


def add_plugin_note(error: Exception) -> None:
    """Add a line below an error's traceback: where in a plugin it arose, or of which plugins parts are in use.

    Also reads the traceback of another process that was added to the error as a note.
    """
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] in _imported_plugins]
    files = {str(getattr(module, "__file__", None)) for module in modules}
    lines = re.findall(r'File "(.+)", line (\d+), in (\S+)', "".join(traceback.format_exception(error)))
    in_plugins = [f"{file}:{line}, in {function}" for file, line, function in lines if file in files]
    if in_plugins:
        error.add_note(f"plugins: this arose in a plugin or below it, at {in_plugins[-1]}: mend it there")
    elif _places_of_used_parts:
        parts = ", ".join(f"{part} ({place})" for part, place in _places_of_used_parts.items())
        error.add_note(f"plugins: in use are {parts}: compare what they take and return with the manual")


def _find_registering_line() -> str | None:
    """Return file and line of the module outside megatfm that is registering a part; None if megatfm is."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if module == "importlib":
            return None
        if module != "megatfm":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def import_foreign_plugins(packages: Iterable[str], source: str | Path, *, trusted: bool) -> None:
    """Import the plugins that the config of a run or a checkpoint names, which may be untrusted code.

    Raises UsageError unless `trusted`, if any of them isn't imported yet.
    """
    names = list(packages)
    check_foreign_plugins(names, source, trusted=trusted)
    import_plugins(names)


def check_foreign_plugins(names: Iterable[str], source: str | Path, *, trusted: bool) -> None:
    """Raise UsageError for plugins that `import_foreign_plugins` would refuse."""
    if not trusted and (foreign := [name for name in names if name not in sys.modules]):
        raise UsageError(
            f"{source}: its config names plugins, whose code would run: {', '.join(foreign)}: if you trust them, give "
            "--trust-plugins (in Python trust_plugins=True), or name them yourself (plugins=…, in Python import)"
        )


def add_plugin_folders(packages: Iterable[str], folders: Sequence[Path]) -> None:
    """Add to sys.path, for each package that can't be imported, the first of the folders that contains it.

    Folders are appended, so that they shadow neither installed packages nor PYTHONPATH.
    """
    importlib.invalidate_caches()
    for name in {package.partition(".")[0] for package in packages}:
        if not name or name in sys.modules or importlib.util.find_spec(name) is not None:
            continue
        paths = [str(folder.resolve()) for folder in folders]
        sys.path += [path for path in paths if PathFinder.find_spec(name, [path]) is not None][:1]
