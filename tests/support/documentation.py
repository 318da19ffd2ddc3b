"""Pages of the manual, plugins that they show, the source as modules, benchmark scripts."""

import ast
import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def list_code_blocks(language: str) -> Iterator[tuple[Path, str, str]]:
    """Fenced blocks of a language in all pages: page, title, text."""
    for page in PAGES:
        for actual, title, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if actual == language:
                yield page, title, text


def load_module(path: Path) -> ModuleType:
    """Import a file that lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


PLUGINS = ROOT / "tests" / "plugins"
PLUGIN_LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"dp_shard": 1}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "zero3": {"dp_shard": 2},
}  # fmt: skip


def get_code_block(page: str, language: str, title: str) -> str:
    """The one fenced block of this language and title on a page."""
    (text,) = (text for path, name, text in list_code_blocks(language) if (path.name, name) == (page, title))
    return text


FOLDERS = {"data_prep", "launchers", "slurm"}
"""Rooms beside `megatfm`, imported through links in it."""


def get_module_name(path: Path) -> str:
    """Name of the module in a file of `megatfm` or of a folder beside it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["megatfm"] * (parts[0] in FOLDERS) + [*parts]).removesuffix(".__init__")


@cache
def parse_source(source: str) -> ast.Module:
    """Parse without searches for garbage: each traverses the nodes of all trees so far, for most of the time."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def parse_folders(*folders: str) -> dict[Path, ast.Module]:
    """Python file → its syntax tree."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: parse_source(path.read_text(encoding="utf-8")) for path in paths}


def iter_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, at any depth."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        parts = getattr(node, field, ())
        for part in parts if isinstance(parts, list) else ():  # a lambda's body is one expression
            yield part
            yield from iter_statements(part)


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """Load a script, which finds those beside it; none stays importable by its bare name, which may be a library's."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(module)
    for path in BENCHMARKS.glob("*.py"):
        if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
            del sys.modules[path.stem]
    return module
