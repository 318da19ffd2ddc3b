"""A copy of the code as it is at submission, so that a job which waits for days runs what was submitted.

The importable packages are copied, rather than a git commit with a diff: what runs is then exactly what was
imported, wheel or checkout, committed or not, and a node needs neither git nor the checkout. It takes a few megabytes,
and is shared by all submissions of the same code.
"""

import ast
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from megatfm import version
from megatfm.errors import UsageError
from megatfm.files import atomic_write

EXCLUDED = {"__pycache__", "testcluster", "runs", "corpora"}
INSTALLED = {"site-packages", "dist-packages"}
PLUGIN_BYTES = 64 * 10**6
"""A plugin is code: more is data that lies in its folder by mistake."""
ORIGIN = "origin.json"


@dataclass(frozen=True)
class Snapshot:
    """The code to copy: each file's name below the copy, and where it is now."""

    files: dict[str, Path]

    @property
    def dir_name(self) -> str:
        """`code-` and a hash of all names and contents."""
        digest = blake3()
        for name, path in self.files.items():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        return f"code-{digest.hexdigest()[:12]}"

    def copy_to(self, folder: Path) -> Path:
        """Copy into `folder`/NAME unless it is there already; returns that. Raises OSError."""
        place = folder / self.dir_name
        if place.is_dir():
            return place
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            for name, path in self.files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial / name)
            atomic_write(partial / ORIGIN, json.dumps(code_origin(), indent=1) + "\n")
            with contextlib.suppress(FileExistsError):  # another submission was faster
                partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return place


def collect_code(plugins: Sequence[str]) -> Snapshot:
    """Files to copy for a run: megatfm, its plugins, and modules in their folders that they import.

    Plugins that were installed are part of the environment, and stay where they are. Raises UsageError for a plugin
    that isn't there, or is too large.
    """
    roots = {"megatfm": Path(version.__file__).parent}
    for plugin in plugins:
        name = plugin.partition(".")[0]
        path = _find_module(name)
        if path is None:
            raise UsageError(
                f"plugins: can't find {name!r}: install it, or start from the folder that holds it"
            )
        if not INSTALLED & set(path.parts) and name not in roots:
            _add(name, path, roots)
    files: dict[str, Path] = {}
    for name, root in roots.items():
        paths = [root] if root.is_file() else sorted(_walk(root))
        if name != "megatfm":
            _check_size(name, root, paths)
        files |= {str(path.relative_to(root.parent)): path for path in paths}
    return Snapshot(dict(sorted(files.items())))


def _add(name: str, path: Path, roots: dict[str, Path]) -> None:
    """Enter a plugin, and every module from the same folder that one of its files imports."""
    roots[name] = path
    sources = [path] if path.is_file() else [file for file in _walk(path) if file.suffix == ".py"]
    for module in sorted(set().union(*map(_imported, sources)) - set(roots)):
        module_path = _find_module(module) if any(path.parent.glob(f"{module}*")) else None
        if module_path is not None and module_path.parent == path.parent:
            _add(module, module_path, roots)


def _imported(source: Path) -> set[str]:
    """Top-level names that a file imports, anywhere in it; none of a file that is no Python: its import will say so."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (SyntaxError, ValueError, OSError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    return {name.partition(".")[0] for name in names}


def _check_size(name: str, root: Path, files: Sequence[Path]) -> None:
    sizes = {path: path.stat().st_size for path in files}
    if (total := sum(sizes.values())) > PLUGIN_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise UsageError(
            f"plugins: {name}: {root} holds {total / 1e6:.0f} MB, of which {largest.relative_to(root.parent)} is the "
            f"largest, and each submission copies it: keep what is more than {PLUGIN_BYTES / 1e6:.0f} MB outside the "
            "package"
        )


def code_origin() -> dict[str, object]:
    """Origin of the code, for people: version, and commit and changed files where it is a git checkout."""
    root = Path(version.__file__).parents[1]
    origin: dict[str, object] = {"megatfm": version.__version__, "copied_from": str(root)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for key, words in {"commit": ("rev-parse", "HEAD"), "changed": ("status", "--porcelain")}.items():
            result = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
            )
            origin[key] = result.stdout.splitlines() if key == "changed" else result.stdout.strip()
    return origin


def _find_module(name: str) -> Path | None:
    """The folder of a package, or the file of a module; None if it can't be found. Imports nothing new."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Files below a folder: none that is hidden, of a run or of a corpus. Links are followed, but not up again."""
    above |= {folder.resolve()}
    for path in folder.iterdir():
        if path.name in EXCLUDED or path.name.startswith(".") or path.suffix == ".pyc":
            continue
        if path.is_dir():
            if path.resolve() not in above:
                yield from _walk(path, above)
        elif path.is_file():
            yield path
