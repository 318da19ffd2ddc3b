"""MkDocs hook: every part of a model and of its training, by its key and the names it takes, from the registries."""

import inspect
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from megatfm.config import Config
from megatfm.config.section import get_variant_name, list_sections
from megatfm.data.image_transforms import TRANSFORMS
from megatfm.engines.registry import ENGINES
from megatfm.layers.attention import ATTENTIONS
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.feed_forward import ACTIVATIONS, FFNS
from megatfm.layers.initialisation import INITIALISATIONS
from megatfm.layers.moe import ROUTERS
from megatfm.layers.norm import NORMS, RESIDUALS
from megatfm.layers.output_head import HEADS
from megatfm.layers.position import POSITIONS
from megatfm.models import MODELS
from megatfm.objectives import OBJECTIVES
from megatfm.optim.lr_schedules import SCHEDULES
from megatfm.optim.parameters import OPTIMIZERS
from megatfm.registry import Registry
from megatfm.tracking.metrics import SINKS

PARTS: dict[str, Registry[Any]] = {
    "model.family": MODELS,
    "model.attention.name": ATTENTIONS,
    "model.attention.pattern.name": PATTERNS,
    "model.ffn.name": FFNS,
    "model.ffn.activation": ACTIVATIONS,
    "model.ffn.router.name": ROUTERS,
    "model.norm.name": NORMS,
    "model.norm.placement": RESIDUALS,
    "model.position.name": POSITIONS,
    "model.embedding.name": EMBEDDINGS,
    "model.extra_heads.NAME": HEADS,
    "model.init.name": INITIALISATIONS,
    "objective.name": OBJECTIVES,
    "optimizer.name": OPTIMIZERS,
    "lr_schedule.name": SCHEDULES,
    "data.images.transforms": TRANSFORMS,
    "parallel.engine": ENGINES,
    "log.sinks": SINKS,
}
"""Key → what there is under it."""

OF_ACTIVATIONS = {
    "clamped_swiglu": "gpt-oss's SwiGLU: both inputs are clamped to 7, and x V + 1 is gated.",
    "geglu": "GELU(x W) ⊙ x V (Shazeer 2020).",
    "geglu_tanh": "The same with `gelu_tanh`, as in T5 1.1.",
    "gelu": "x Φ(x) (Hendrycks & Gimpel 2016).",
    "gelu_tanh": "GELU's approximation by tanh, as in GPT-1 and GPT-2.",
    "quick_gelu": "x σ(1.702 x), as in OpenAI's CLIP.",
    "relu": "max(x, 0).",
    "relu2": "max(x, 0)² (So et al. 2021).",
    "swiglu": "Swish(x W) ⊙ x V (Shazeer 2020).",
    "swish": "x σ(x), also called SiLU (Ramachandran et al. 2017).",
}
"""Activations are functions of torch, whose docstrings are of another kind."""

INTRODUCTION = (
    "What each key takes, from the code's own tables. `megatfm config show CONFIG` prints what a config has; options "
    "of a part are in [the training config](config.md), and a plugin adds names of its own."
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page."""
    files.remove(files.src_uris["reference/parts.md"])  # what stands there in the repository
    files.append(File.generated(config, "reference/parts.md", content=page()))
    return files


def page() -> str:
    """A table for each key: the names, and what the config says of them."""
    parts = ["# Parts", INTRODUCTION]
    for key, registry in PARTS.items():
        descriptions = {**_describe_variants(key), **(OF_ACTIVATIONS if registry is ACTIVATIONS else {})}
        rows = [
            f"| `{name}` | {descriptions.get(name) or _docstring(registry.get(name))} |" for name in registry.names()
        ]
        parts.append("\n".join([f"## `{key}`", "", "| Name | What it is |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _describe_variants(key: str) -> dict[object, str]:
    """By name, the docstring of the section that the name chooses; nothing for keys that choose none."""
    *sections, last = key.split(".")
    options: list[Any] = [Config]
    for part in sections:
        options = [
            variant for option in options if part in option.model_fields for variant in list_sections(option, part)
        ]
    if last != "name":
        return {}
    return {get_variant_name(option): _first_line(option) for option in options if len(options) > 1}


def _docstring(part: Any) -> str:
    return "" if isinstance(part, (str, int, tuple, dict)) or _is_plain_instance(part) else _first_line(part)


def _is_plain_instance(part: Any) -> bool:
    return not (inspect.isclass(part) or inspect.isroutine(part))


def _first_line(part: Any) -> str:
    line = (inspect.getdoc(part) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return line.partition(" Raises ")[0]
