"""MkDocs hook: the Python reference, made from what `import megatfm` offers whenever the docs are built."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import megatfm

INTRODUCTION = (
    "What `import megatfm` offers; everything else may change between versions. Importing it loads no torch: "
    "that comes with the first use."
)
PAGE, HEADING = Path(__file__).parent / "reference" / "python.md", "## Reference"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page."""
    files.remove(files.src_uris["reference/python.md"])  # what stands there in the repository
    files.append(File.generated(config, "reference/python.md", content=page()))
    return files


def page() -> str:
    """The page's own text, then a section for each offer, with its signature and what its docstring says."""
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    return "\n\n".join([text, HEADING, INTRODUCTION, *sections()]) + "\n"


def sections() -> Iterator[str]:
    for name in sorted(megatfm.__all__):
        offer = getattr(megatfm, name)
        if callable(offer):
            yield f"## `megatfm.{name}`\n\n{told(name, offer)}"
            for method, value in vars(offer).items() if name == "Model" else ():
                if not method.startswith("_"):
                    shown = value.fget if isinstance(value, property) else value
                    yield f"### `Model.{method}`\n\n{told(method, shown, isinstance(value, property))}"


def told(name: str, offer: Any, is_property: bool = False) -> str:
    """A signature, and the docstring as paragraphs."""
    text = inspect.getdoc(offer) or ""
    if name == "Config" or is_property:
        return text + (" Its keys are in [the training config](config.md)." if name == "Config" else "")
    parameters = inspect.signature(offer).parameters.values()
    shown = inspect.Signature([each for each in parameters if each.name != "self"])
    signature = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", f"{name}{shown}")  # Path, not pathlib.Path
    return f"```{{.python}}\n{signature}\n```\n\n{text}"
