"""Copies the code at submission, so that a job that waits for days runs what was submitted.

Copies the importable packages instead of noting a git commit and a diff. So the job runs exactly what was imported at
submission, from a wheel or a checkout, committed or not, and nodes need neither git nor the checkout. A copy takes a
few megabytes; all submissions of the same code share it.
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
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from megatfm import version
from megatfm.errors import UsageError
from megatfm.files import atomic_write

EXCLUDED = {"__pycache__", "testcluster", "runs", "corpora"}
INSTALL_FOLDERS = {"site-packages", "dist-packages"}
MAX_PLUGIN_BYTES = 64 * 10**6
"""Largest plugin that is copied: a larger one probably contains data by mistake."""
ORIGIN = "origin.json"


@dataclass(frozen=True)
class Snapshot:
    """The code to copy: path relative to the copy → source file."""

    files: dict[str, Path]

    @cached_property
    def dir_name(self) -> str:
        """Name of the copy: `code-` and a hash of all paths and contents."""
        digest = blake3()
        for name, path in self.files.items():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        return f"code-{digest.hexdigest()[:12]}"

    def copy_to(self, folder: Path) -> Path:
        """Copy the code into `folder`/`dir_name` unless it exists; return that path. Raises OSError."""
        target = folder / self.dir_name
        if target.is_dir():
            return target
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            for name, path in self.files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial / name)
            atomic_write(partial / ORIGIN, json.dumps(describe_code_origin(), indent=1) + "\n")
            try:
                partial.rename(target)
            except OSError:
                if not target.is_dir():  # else a concurrent submission has just made the same copy
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return target


def collect_code(plugins: Sequence[str]) -> Snapshot:
    """Collect the files to copy for a run: megatfm, its plugins, and modules beside the plugins that they import.

    Installed plugins are part of the environment, and are not copied. Raises UsageError for a plugin that can't be
    found or is too large.
    """
    roots = {"megatfm": Path(version.__file__).parent}
    for plugin in plugins:
        name = plugin.partition(".")[0]
        path = _find_module(name)
        if path is None:
            raise UsageError(f"plugins: can't find {name!r}: install it, or start from the folder that holds it")
        if not INSTALL_FOLDERS & set(path.parts) and name not in roots:
            _add_with_imports(name, path, roots)
    files: dict[str, Path] = {}
    for name, root in roots.items():
        paths = [root] if root.is_file() else sorted(_walk(root))
        if name != "megatfm":
            _check_size(name, root, paths)
        files |= {str(path.relative_to(root.parent)): path for path in paths}
    return Snapshot(dict(sorted(files.items())))


def _add_with_imports(name: str, path: Path, roots: dict[str, Path]) -> None:
    """Add a module to `roots`, and recursively the modules in the same folder that it imports."""
    roots[name] = path
    sources = [path] if path.is_file() else [file for file in _walk(path) if file.suffix == ".py"]
    for module in sorted(set().union(*map(_list_imported_modules, sources)) - set(roots)):
        module_path = _find_module(module) if any(path.parent.glob(f"{module}*")) else None
        if module_path is not None and module_path.parent == path.parent:
            _add_with_imports(module, module_path, roots)


def _list_imported_modules(source: Path) -> set[str]:
    """Return the top-level modules that a file imports; none if it can't be parsed, since importing it will fail."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (SyntaxError, ValueError, OSError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _check_size(name: str, root: Path, files: Sequence[Path]) -> None:
    sizes = {path: path.stat().st_size for path in files}
    if (total := sum(sizes.values())) > MAX_PLUGIN_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise UsageError(
            f"plugins: {name}: {root} holds {total / 1e6:.0f} MB, more than the {MAX_PLUGIN_BYTES / 1e6:.0f} MB that a "
            f"submission copies; the largest file is {largest.relative_to(root.parent)}: keep data outside the package"
        )


def describe_code_origin() -> dict[str, object]:
    """Describe the code's origin: version and path; in a git checkout, also the commit and the changed files."""
    root = Path(version.__file__).parents[1]
    origin: dict[str, object] = {"megatfm": version.__version__, "copied_from": str(root)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for key, argv in {"commit": ("rev-parse", "HEAD"), "changed": ("status", "--porcelain")}.items():
            result = subprocess.run(
                ["git", "-C", str(root), *argv], capture_output=True, text=True, check=True, timeout=30
            )
            origin[key] = result.stdout.splitlines() if key == "changed" else result.stdout.strip()
    return origin


def _find_module(name: str) -> Path | None:
    """Return a package's folder or a module's file, without importing it; None if it can't be found."""
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
    """Yield the files below a folder, except hidden ones, runs and corpora. Follows links that form no cycle."""
    above |= {folder.resolve()}
    for path in folder.iterdir():
        if path.name in EXCLUDED or path.name.startswith(".") or path.suffix == ".pyc":
            continue
        if path.is_dir():
            if path.resolve() not in above:
                yield from _walk(path, above)
        elif path.is_file():
            yield path
