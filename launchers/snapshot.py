"""A copy of the code as it is at submission, so that a job which waits for days runs what was submitted.

The importable packages are copied, rather than a git commit with a diff: what runs is then exactly what was
imported, wheel or checkout, committed or not, and a node needs neither git nor the checkout. It is about a megabyte,
and shared by all submissions of the same code.
"""

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
from megatfm.atomic import write_whole
from megatfm.errors import UsageError

PACKAGES = ("megatfm", "data_prep", "launchers", "slurm")
LEFT_OUT = {"__pycache__", "testcluster"}
ORIGIN = "origin.json"


@dataclass(frozen=True)
class Snapshot:
    """The code to copy: each file's name below the copy, and where it is now."""

    files: dict[str, Path]

    @property
    def name(self) -> str:
        """`code-` and a hash of all names and contents."""
        digest = blake3()
        for name, path in self.files.items():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        return f"code-{digest.hexdigest()[:12]}"

    def write(self, folder: Path) -> Path:
        """Copy into `folder`/NAME unless it is there already; returns that. Raises OSError."""
        place = folder / self.name
        if place.is_dir():
            return place
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            for name, path in self.files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial / name)
            write_whole(partial / ORIGIN, json.dumps(origin(), indent=1) + "\n")
            with contextlib.suppress(FileExistsError):  # another submission was faster
                partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return place


def take(plugins: Sequence[str]) -> Snapshot:
    """What would be copied for a run with these plugins. Raises UsageError for a plugin that isn't there.

    Plugins that were installed are part of the environment, and stay where they are.
    """
    roots = {name: path for name in PACKAGES if (path := _place(name))}
    for plugin in plugins:
        name = plugin.partition(".")[0]
        path = _place(name)
        if path is None:
            raise UsageError(
                f"plugins: can't find {name!r}: install it, or start from the folder that holds it"
            )
        if not {"site-packages", "dist-packages"} & set(path.parts):
            roots.setdefault(name, path)
    files = {
        str(Path(path.relative_to(root.parent))): path
        for root in roots.values()
        for path in ([root] if root.is_file() else sorted(_walk(root)))
    }
    return Snapshot(dict(sorted(files.items())))


def origin() -> dict[str, object]:
    """Where the code came from, for people: version, and commit and changed files where it is a git checkout."""
    root = Path(version.__file__).parents[1]
    said: dict[str, object] = {"megatfm": version.__version__, "copied_from": str(root)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for key, words in {"commit": ("rev-parse", "HEAD"), "changed": ("status", "--porcelain")}.items():
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
            )
            said[key] = done.stdout.splitlines() if key == "changed" else done.stdout.strip()
    return said


def _place(name: str) -> Path | None:
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


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in LEFT_OUT or path.suffix == ".pyc":
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path
