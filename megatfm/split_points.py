"""Split points: where a model may be split into pipeline stages, as models declare it and pipelines read it.

A model's `forward` is plain code. Beside it, `split_points` lists its parts in their order, with the modules that each
runs and what it hands to later ones; there are no functions to run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class CarrySpec:
    """Shape and type of a tensor that stages hand on: [B, T, d_model] in the activations' type, or int64 [B, T] if
    `d_model` is None. B and T are those of the batch's field `shape_of`, unless `length_of` computes T from the batch.
    """

    shape_of: str
    d_model: int | None = None
    length_of: Callable[[Mapping[str, Any]], int] | None = None


@dataclass(frozen=True)
class SplitPoint:
    """A part of a model with which a pipeline stage may begin.

    modules: paths of the modules that it runs. reads, writes: the carry, by the keywords under which `forward` takes
    it. token_field: the field of the batch whose tokens go through it.
    """

    name: str
    modules: Sequence[str] = ()
    reads: Sequence[str] = ()
    writes: Mapping[str, CarrySpec] = field(default_factory=dict)
    token_field: str = "tokens"


class Splittable(Protocol):
    """A model that pipelines can split, beside being a module."""

    split_points: Sequence[SplitPoint]

    def stage(self, names: Collection[str]) -> Self:
        """Return a view of the model, over the same modules, that runs the split points of these names alone."""
        ...

    def forward(self, **batch: Any) -> Any:
        """Return an output with `losses` and, from `carried()`, what the view's split points write."""
        ...


def live_fields(split_points: Sequence[SplitPoint], index: int) -> dict[str, CarrySpec]:
    """Return the carry that split points from `index` on read and earlier ones have written."""
    read: set[str] = set()
    for point in reversed(split_points[index:]):
        read = (read - set(point.writes)) | set(point.reads)
    written_names: dict[str, CarrySpec] = {}
    for point in split_points[:index]:
        written_names |= point.writes
    return {name: written_names[name] for name in sorted(read) if name in written_names}
