"""Starting from the weights of another run."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.engines.interface import Engine
from megatfm.errors import UsageError
from megatfm.ranks import run_on_rank_0
from megatfm.registry import did_you_mean

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 6
"""So many names of a kind are listed, and the others counted."""


@dataclass(frozen=True)
class Takeover:
    """What a model takes over from a checkpoint, what stays as it was drawn, and what it leaves there; by name."""

    source: Path
    taken: Shapes
    drawn: Shapes
    left: Shapes

    @property
    def is_partial(self) -> bool:
        """Whether some parameters are not in the checkpoint and stay as they were drawn."""
        return bool(self.drawn)

    def __str__(self) -> str:
        share = (
            f"{len(self.taken)} of the {len(self.taken) + len(self.drawn)} " if self.is_partial else "the "
        )
        return f"{share}weights of {self.source}"

    def lines(self) -> list[str]:
        """A table for the log."""
        return [
            f"weights of {self.source}",
            f"  taken over  {_counted(self.taken)}",
            f"  drawn       {_counted(self.drawn)}{_listed(self.drawn)}",
            f"  left there  {_counted(self.left)}{_listed(self.left)}",
        ]


def origin_of(source: Path, tokenizer: str) -> JsonValue:
    """What a checkpoint knows of the folder that its model came from, for the run's own to keep; None if the run has
    another tokenizer (its hash). A collective."""
    state = run_on_rank_0(lambda: dict(checkpoint.read_state(source)))
    return state.get("origin") if state.get("tokenizer") == tokenizer else None


def load_weights(engine: Engine, path: str | Path, only: Sequence[str] = ()) -> "Takeover":
    """Fill the engine's weights, and nothing else, from a run or checkpoint of any layout and precision.

    only: patterns over names, such as "decoder.*", of the weights that are taken over; the others stay as they are.
    Raises UsageError if one that is wanted is not there, or has another shape. A collective.
    """
    source = run_on_rank_0(lambda: checkpoint.find_checkpoint(path))  # the run there may save meanwhile
    stored = {
        name.removeprefix("model."): tuple(shape)
        for name, (_, shape) in run_on_rank_0(lambda: checkpoint.names(source)).items()
        if name.startswith("model.")
    }
    wanted = {name: p.shape for name, p in {**engine.layout, **engine.layout.state}.items()}
    takeover = what_fits(wanted, stored, only, source)
    weights = {f"model.{name}": box for name, box in engine.weights().items() if name in takeover.taken}
    checkpoint.load(source, weights, cast=True)
    engine.weights_changed()
    return takeover


def what_fits(wanted: Shapes, stored: Shapes, only: Sequence[str], source: Path) -> Takeover:
    """Which of a model's weights come from a checkpoint: all, or those whose names match a pattern of `only`.

    Raises UsageError that says what of them is not there, and which patterns would do.
    """
    chosen = {name for name in wanted if not only or any(fnmatchcase(name, pattern) for pattern in only)}
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in wanted):
            raise UsageError(
                f"train.init_only: {pattern!r} matches none of the model's weights{did_you_mean(pattern, wanted)}; "
                f"patterns are such as {', '.join(map(repr, _fitting(wanted, stored) or ['decoder.*']))}"
            )
    unfit = [name for name in wanted if name in chosen and stored.get(name) != wanted[name]]
    if unfit:
        told = [
            f"{name} is {list(stored[name])} there and {list(wanted[name])} here"
            if name in stored
            else f"it has no {name}"
            for name in unfit[:3]
        ]
        more = f" and {len(unfit) - 3} more" if len(unfit) > 3 else ""
        patterns = _fitting(wanted, stored)
        there, here = _parts(stored), _parts(wanted)
        experts_there, experts_here = ({n for n in s if ".ffn.experts." in n} for s in (stored, wanted))
        if experts_there and not experts_here:
            way = (
                "these are the weights of a mixture of experts, and the model is dense, which can't have them: set "
                "model.ffn.name = 'moe' with its sizes, or take the weights of a dense model"
            )
        elif experts_here and not experts_there:
            way = (
                "these are the weights of a dense model, and this one has experts: `megatfm convert "
                f"{shlex.quote(str(source))} NEW --to moe --experts N` makes a mixture that computes the same"
            )
        elif patterns:
            way = f"name the weights to take over, {shlex.quote(f'train.init_only={json.dumps(patterns)}')}"
        elif here - there:
            way = (
                f"these are the weights of another model.family ({', '.join(sorted(there))}; here "
                f"{', '.join(sorted(here))}): choose that one, or take the weights of a run of this one"
            )
        else:
            way = "take the weights of a model of these sizes, or choose its sizes"
        raise UsageError(f"train.init_from = {source}: {'; '.join(told)}{more}: {way}")
    return Takeover(
        source,
        {name: shape for name, shape in wanted.items() if name in chosen},
        {name: shape for name, shape in wanted.items() if name not in chosen},
        {name: shape for name, shape in stored.items() if name not in chosen},
    )


def _parts(shapes: Shapes) -> set[str]:
    return {name.partition(".")[0] for name in shapes}


def _fitting(wanted: Shapes, stored: Shapes) -> list[str]:
    """Patterns of the parts of a model that are in a checkpoint, whole and with the same shapes."""
    parts: dict[str, bool] = {}
    for name, shape in wanted.items():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, True) and stored.get(name) == shape
    return [f"{part}.*" for part, fits in parts.items() if fits]


def _counted(shapes: Shapes) -> str:
    return f"{len(shapes)} tensors, {sum(prod(shape) for shape in shapes.values()):,} parameters"


def _listed(shapes: Shapes) -> str:
    named = [f"{name} {list(shape)}" for name, shape in list(shapes.items())[:SHOWN]]
    more = [f"{len(shapes) - SHOWN} more"] if len(shapes) > SHOWN else []
    return f": {', '.join(named + more)}" if shapes else ""
