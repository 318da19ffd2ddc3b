"""Starting from the weights of another run."""

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
from megatfm.engines.interface import Engine
from megatfm.errors import UsageError
from megatfm.layers.lora import FACTORS
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.registry import did_you_mean

Shapes = Mapping[str, tuple[int, ...]]
MAX_LISTED = 6
"""Names of a kind that are listed; the others are counted."""


@dataclass(frozen=True)
class LoadReport:
    """Names and shapes that a model loads from a checkpoint, that keep their initial values, and that are not used."""

    source: Path
    loaded: Shapes
    missing: Shapes
    unexpected: Shapes

    @property
    def has_missing(self) -> bool:
        """Return whether some parameters are not in the checkpoint and stay as they were drawn."""
        return bool(self.missing)

    def __str__(self) -> str:
        share = (
            f"{len(self.loaded)} of the {len(self.loaded) + len(self.missing)} "
            if self.has_missing
            else "the "
        )
        return f"{share}weights of {self.source}"

    def lines(self) -> list[str]:
        """A table for the log."""
        return [
            f"weights of {self.source}",
            f"  taken over  {_count(self.loaded)}",
            f"  drawn       {_count(self.missing)}{_list_names(self.missing)}",
            f"  left there  {_count(self.unexpected)}{_list_names(self.unexpected)}",
        ]


def origin_of(source: Path, tokenizer: str) -> JsonValue:
    """Return a checkpoint's record of the folder that its model came from; None if the run has another tokenizer (its
    hash). A collective."""
    state = run_on_rank_0_raising(lambda: dict(checkpoint.read_state(source)))
    return state.get("origin") if state.get("tokenizer") == tokenizer else None


def identity_of(source: Path) -> JsonValue:
    """Return what a checkpoint of adapters says of the one that they are beside: its folder, and the hash of its
    metadata, which has the hash of each file. A collective."""
    digest = run_on_rank_0_raising(lambda: blake3((source / METADATA_FILENAME).read_bytes()).hexdigest())
    return {"checkpoint": str(source.absolute()), "blake3": digest}


def load_weights(engine: Engine, path: str | Path, patterns: Sequence[str] = ()) -> "LoadReport":
    """Fill the engine's weights, and nothing else, from a run or checkpoint of any layout and precision.

    only: patterns over names, such as "decoder.*", of the weights that are taken over; the others stay as they are.
    Raises UsageError if one that is wanted is not there, or has another shape. A collective.
    """
    source = run_on_rank_0_raising(
        lambda: checkpoint.find_checkpoint(path)
    )  # the run there may save meanwhile
    stored = {
        name.removeprefix("model."): tuple(shape)
        for name, (_, shape) in run_on_rank_0_raising(lambda: checkpoint.names(source)).items()
        if name.startswith("model.")
    }
    shapes = {name: p.shape for name, p in {**engine.layout, **engine.layout.state}.items()}
    report = match_weights(shapes, stored, patterns, source)
    weights = {f"model.{name}": box for name, box in engine.weights().items() if name in report.loaded}
    checkpoint.load(source, weights, cast=True)
    engine.weights_changed()
    return report


def match_weights(expected: Shapes, stored: Shapes, only: Sequence[str], source: Path) -> LoadReport:
    """Match a model's weights with a checkpoint's: all, or those whose names match a pattern of `only`.

    Raises UsageError that says what of them is not there, and which patterns would do.
    """
    _check_adapters(expected, stored, source)
    sought = {name: s for name, s in expected.items() if name in stored or not name.endswith(FACTORS)}
    selected = {name for name in sought if not only or any(fnmatchcase(name, pattern) for pattern in only)}
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in expected):
            loadable = ", ".join(map(repr, _loadable_patterns(sought, stored) or ["decoder.*"]))
            raise UsageError(
                f"train.init_include: {pattern!r} matches none of the model's weights"
                f"{did_you_mean(pattern, expected)}; patterns are such as {loadable}"
            )
    unfit = [name for name in expected if name in selected and stored.get(name) != expected[name]]
    if unfit:
        mismatches = [
            f"{name} is {list(stored[name])} there and {list(expected[name])} here"
            if name in stored
            else f"it has no {name}"
            for name in unfit[:3]
        ]
        more = f" and {len(unfit) - 3} more" if len(unfit) > 3 else ""
        patterns = _loadable_patterns(sought, stored)
        source_checkpoint, model = _top_modules(stored), _top_modules(expected)
        experts_there, experts_here = ({n for n in s if ".ffn.experts." in n} for s in (stored, expected))
        if experts_there and not experts_here:
            advice = (
                "these are the weights of a mixture of experts, and the model is dense, which can't have them: set "
                "model.ffn.name = 'moe' with its sizes, or take the weights of a dense model"
            )
        elif experts_here and not experts_there:
            advice = (
                "these are the weights of a dense model, and this one has experts: `megatfm convert "
                f"{shlex.quote(str(source))} NEW --to moe --experts N` makes a mixture that computes the same"
            )
        elif patterns:
            advice = (
                f"name the weights to take over, {shlex.quote(f'train.init_include={json.dumps(patterns)}')}"
            )
        elif model - source_checkpoint:
            advice = (
                f"these are the weights of another model.family ({', '.join(sorted(source_checkpoint))}; here "
                f"{', '.join(sorted(model))}): choose that one, or take the weights of a run of this one"
            )
        else:
            advice = "take the weights of a model of these sizes, or choose its sizes"
        raise UsageError(f"train.init_from = {source}: {'; '.join(mismatches)}{more}: {advice}")
    return LoadReport(
        source,
        {name: shape for name, shape in expected.items() if name in selected},
        {name: shape for name, shape in expected.items() if name not in selected},
        {name: shape for name, shape in stored.items() if name not in selected},
    )


def _check_adapters(wanted: Shapes, stored: Shapes, source: Path) -> None:
    """Raise a UsageError for adapters that the model would start without."""
    lost = sorted(name for name in stored if name.endswith(FACTORS) and name not in wanted)
    if lost:
        raise UsageError(
            f"train.init_from = {source}: has an adapter, {lost[0]}, that this model lacks, so it would be another: "
            f"merge it first, `megatfm convert {shlex.quote(str(source))} NEW --to megatfm`, or keep its [model.lora]"
        )


def _top_modules(shapes: Shapes) -> set[str]:
    return {name.partition(".")[0] for name in shapes}


def _loadable_patterns(expected: Shapes, stored: Shapes) -> list[str]:
    """Return patterns of a model's modules that are completely in a checkpoint, with the same shapes."""
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
