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
MAX_WIDTH = 88
"""Longest line of a signature."""
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
            yield f"## `megatfm.{name}`\n\n{describe(name, offer)}"
            for method, value in vars(offer).items() if name == "Model" else ():
                if not method.startswith("_"):
                    shown = value.fget if isinstance(value, property) else value
                    yield f"### `Model.{method}`\n\n{describe(method, shown, isinstance(value, property))}"


def describe(name: str, offer: Any, is_property: bool = False) -> str:
    """A signature, and the docstring as paragraphs."""
    text = inspect.getdoc(offer) or ""
    if name == "Config" or is_property:
        return text + (" Its keys are in [the training config](config.md)." if name == "Config" else "")
    return f"```{{.python}}\n{format_signature(name, offer)}\n```\n\n{text}"


def format_signature(name: str, offer: Any) -> str:
    """A signature without `self`, with a line for each parameter where one line would be too long."""
    parameters = [p for p in inspect.signature(offer).parameters.values() if p.name != "self"]
    signature = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", f"{name}{inspect.Signature(parameters)}")  # Path, no pathlib.
    if len(signature) <= MAX_WIDTH:
        return signature
    arguments = re.split(r", (?![^\[]*\])", signature[len(name) + 1 : -1])  # at no comma in brackets
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
