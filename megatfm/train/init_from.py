"""Initializes a model from the weights of another run (`train.init_from`)."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from blake3 import blake3
from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.checkpoint.metadata import METADATA_FILENAME
from megatfm.config.model_parts import LoRAConfig
from megatfm.engines.interface import Engine
from megatfm.errors import UsageError
from megatfm.layers.lora import is_factor
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.registry import did_you_mean

Shapes = Mapping[str, tuple[int, ...]]
MAX_LISTED = 6
"""Largest number of names that are listed; further ones are only counted."""


@dataclass(frozen=True)
class LoadReport:
    """Weights by name: loaded from the checkpoint, missing there (they keep their initial values), and unused."""

    source: Path
    loaded: Shapes
    missing: Shapes
    unexpected: Shapes

    def __str__(self) -> str:
        share = f"{len(self.loaded)} of the {len(self.loaded) + len(self.missing)}" if self.missing else "the"
        return f"{share} weights of {self.source}"

    def format_table(self) -> list[str]:
        """Return the lines of a table for the log."""
        return [
            f"weights of {self.source}",
            f"  loaded       {_count(self.loaded)}",
            f"  initialized  {_count(self.missing)}{_list_names(self.missing)}",
            f"  not used     {_count(self.unexpected)}{_list_names(self.unexpected)}",
        ]


def read_origin(source: Path, tokenizer: str) -> JsonValue:
    """Return the checkpoint's record of the Hugging Face folder from which its model was converted; None if there is
    none, or if the run's tokenizer (given by its hash) differs. A collective."""
    state = run_on_rank_0_raising(lambda: dict(checkpoint.read_state(source)))
    return state.get("origin") if state.get("tokenizer") == tokenizer else None


def identify_checkpoint(source: Path) -> JsonValue:
    """Return how a checkpoint of adapters identifies its base checkpoint: by folder, by the hash of the metadata, which
    contains the hashes of all files, and by the Hugging Face folder that it was converted from. A collective."""
    digest, state = run_on_rank_0_raising(
        lambda: (blake3((source / METADATA_FILENAME).read_bytes()).hexdigest(), dict(checkpoint.read_state(source)))
    )
    hf_folder = {"hf_folder": state["hf_folder"]} if "hf_folder" in state else {}
    return {"checkpoint": str(source.absolute()), "blake3": digest, **hf_folder}


def load_weights(engine: Engine, path: str | Path, patterns: Sequence[str] = ()) -> LoadReport:
    """Load the engine's weights, but no optimizer state, from a run or checkpoint of any layout and precision.

    patterns: patterns of names, such as "decoder.*", of the weights to load; the others keep their values. Raises
    UsageError if one of them is missing, or has another shape. A collective.
    """
    # On one rank: the other run may save a newer checkpoint at this moment.
    source = run_on_rank_0_raising(lambda: checkpoint.find_checkpoint(path))
    stored = {
        name.removeprefix("model."): tuple(shape)
        for name, (_, shape) in run_on_rank_0_raising(lambda: checkpoint.read_tensor_specs(source)).items()
        if name.startswith("model.")
    }
    shapes = {name: p.shape for name, p in {**engine.layout, **engine.layout.state}.items()}
    report = match_weights(shapes, stored, patterns, source)
    weights = {f"model.{name}": block for name, block in engine.weights().items() if name in report.loaded}
    checkpoint.load(source, weights, cast=True)
    engine.sync_weights()
    return report


def match_weights(expected: Shapes, stored: Shapes, only: Sequence[str], source: Path) -> LoadReport:
    """Match a model's weights with a checkpoint's: all, or those whose names match a pattern of `only`.

    Raises UsageError that names missing or mismatched weights, and suggests patterns that would work.
    """
    _check_adapters(expected, stored, source)
    # Adapters that the run adds need not be in the checkpoint.
    required = {name: s for name, s in expected.items() if name in stored or not is_factor(name)}
    selected = {name for name in required if not only or any(fnmatchcase(name, pattern) for pattern in only)}
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in expected):
            loadable = ", ".join(map(repr, _find_loadable_patterns(required, stored) or ["decoder.*"]))
            raise UsageError(
                f"train.init_include: {pattern!r} matches none of the model's weights"
                f"{did_you_mean(pattern, expected)}; patterns are such as {loadable}"
            )
    mismatched = [name for name in expected if name in selected and stored.get(name) != expected[name]]
    if mismatched:
        mismatches = [
            f"{name} is {list(stored[name])} there and {list(expected[name])} here"
            if name in stored
            else f"it has no {name}"
            for name in mismatched[:3]
        ]
        more = f" and {len(mismatched) - 3} more" if len(mismatched) > 3 else ""
        advice = _advise_on_mismatch(expected, stored, _find_loadable_patterns(required, stored), source)
        raise UsageError(f"train.init_from = {source}: {'; '.join(mismatches)}{more}: {advice}")
    return LoadReport(
        source,
        {name: shape for name, shape in expected.items() if name in selected},
        {name: shape for name, shape in expected.items() if name not in selected},
        {name: shape for name, shape in stored.items() if name not in selected},
    )


def check_adapter_scale(report: LoadReport, lora: LoRAConfig | None) -> None:
    """Raise UsageError if adapters were loaded whose alpha is not that of the model, lora. A collective."""
    if lora is None or not any(map(is_factor, report.loaded)):
        return
    config = run_on_rank_0_raising(lambda: dict(checkpoint.read_state(report.source))).get("config")
    model = config.get("model") if isinstance(config, dict) else None
    stored = model.get("lora") if isinstance(model, dict) else None
    alpha = stored.get("alpha") if isinstance(stored, dict) else None
    if isinstance(alpha, int | float) and alpha != lora.alpha:
        raise UsageError(
            f"train.init_from = {report.source}: its adapters were trained with model.lora.alpha = {alpha:g}, and with "
            f"{lora.alpha:g} it would be another model: set model.lora.alpha={alpha:g}, or merge them first, `megatfm "
            f"convert {shlex.quote(str(report.source))} NEW --to megatfm`"
        )


def _advise_on_mismatch(expected: Shapes, stored: Shapes, patterns: Sequence[str], source: Path) -> str:
    """Return what to do about weights that don't fit. patterns: modules that could be loaded."""
    stored_modules, model_modules = _list_top_modules(stored), _list_top_modules(expected)
    stored_has_experts, model_has_experts = (
        any(".ffn.experts." in name for name in shapes) for shapes in (stored, expected)
    )
    if stored_has_experts and not model_has_experts:
        return (
            "these are the weights of a mixture of experts, but the model is dense: set model.ffn.name = 'moe' with "
            "its sizes, or use the weights of a dense model"
        )
    if model_has_experts and not stored_has_experts:
        return (
            "these are the weights of a dense model, but this one has experts: `megatfm convert "
            f"{shlex.quote(str(source))} NEW --to moe --experts N` makes a mixture that computes the same"
        )
    if patterns:
        return f"name the weights to load, {shlex.quote(f'train.init_include={json.dumps(patterns)}')}"
    if model_modules - stored_modules:
        return (
            f"these are the weights of another model.family ({', '.join(sorted(stored_modules))}; here "
            f"{', '.join(sorted(model_modules))}): choose that family, or use the weights of a run of this one"
        )
    return "use the weights of a model of the same sizes, or choose its sizes"


def _check_adapters(expected: Shapes, stored: Shapes, source: Path) -> None:
    """Raise UsageError if the checkpoint has adapters that the model lacks."""
    ignored = sorted(name for name in stored if is_factor(name) and name not in expected)
    if ignored:
        raise UsageError(
            f"train.init_from = {source}: has an adapter, {ignored[0]}, without which it would be another model: merge "
            f"it first, `megatfm convert {shlex.quote(str(source))} NEW --to megatfm`, or keep its [model.lora]"
        )


def _list_top_modules(shapes: Shapes) -> set[str]:
    return {name.partition(".")[0] for name in shapes}


def _find_loadable_patterns(expected: Shapes, stored: Shapes) -> list[str]:
    """Return the patterns of those top modules of a model that can be loaded completely from a checkpoint."""
    modules: dict[str, bool] = {}
    for name, shape in expected.items():
        module = name.partition(".")[0]
        modules[module] = modules.get(module, True) and stored.get(name) == shape
    return [f"{module}.*" for module, is_loadable in modules.items() if is_loadable]


def _count(shapes: Shapes) -> str:
    return f"{len(shapes)} tensors, {sum(prod(shape) for shape in shapes.values()):,} parameters"


def _list_names(shapes: Shapes) -> str:
    listed_shapes = [f"{name} {list(shape)}" for name, shape in list(shapes.items())[:MAX_LISTED]]
    more = [f"{len(shapes) - MAX_LISTED} more"] if len(shapes) > MAX_LISTED else []
    return f": {', '.join(listed_shapes + more)}" if shapes else ""
