"""Split points: a model's declaration of where it may be split into pipeline stages.

A model's `forward` is plain code. Its `split_points` list the consecutive parts of this forward pass, with the modules
that each part runs and the tensors that it passes to later parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class CarrySpec:
    """Shape and dtype of a tensor that is passed between stages.

    [B, T, d_model] in the activations' dtype, or int64 [B, T] if `d_model` is None. B and T are those of the batch's
    field `shape_of`, unless `length_of` computes T from the batch.
    """

    shape_of: str
    d_model: int | None = None
    length_of: Callable[[Mapping[str, Any]], int] | None = None


@dataclass(frozen=True)
class SplitPoint:
    """A part of a model's forward pass with which a pipeline stage may begin.

    modules: paths of the modules that it runs. reads, writes: tensors of the carry that it reads and writes, by
    `forward`'s keyword arguments. token_field: field of the batch whose tokens pass through it.
    """

    name: str
    modules: Sequence[str] = ()
    reads: Sequence[str] = ()
    writes: Mapping[str, CarrySpec] = field(default_factory=dict)
    token_field: str = "tokens"


class Splittable(Protocol):
    """Interface of models that can be split into pipeline stages."""

    split_points: Sequence[SplitPoint]

    def stage(self, names: Collection[str]) -> Self:
        """Return a view of the model, over the same modules, that runs only the split points of these names."""
        ...

    def forward(self, **batch: Any) -> Any:
        """Return an output with `losses`, whose `carried()` returns the tensors that the view's split points write."""
        ...


def find_live_fields(split_points: Sequence[SplitPoint], index: int) -> dict[str, CarrySpec]:
    """Return the carry at a split point: tensors that earlier split points write, and that it or later ones read."""
    read_later: set[str] = set()
    for point in reversed(split_points[index:]):
        read_later = (read_later - set(point.writes)) | set(point.reads)
    written: dict[str, CarrySpec] = {}
    for point in split_points[:index]:
        written |= point.writes
    return {name: written[name] for name in sorted(read_later) if name in written}
