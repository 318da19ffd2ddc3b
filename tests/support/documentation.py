"""Pages of the manual, and plugins that they show."""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(language: str) -> Iterator[tuple[Path, str, str]]:
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


def block_on_page(page: str, language: str, title: str) -> str:
    """The one fenced block of this language and title on a page."""
    (text,) = (text for path, name, text in fences(language) if (path.name, name) == (page, title))
    return text
