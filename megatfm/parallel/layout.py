"""The layout table: where each parameter's elements are, and over which axis its gradient is still to be summed.

Tensor-parallel shards are plain local tensors. FSDP2 cuts them once more, along dim 0 and over its own axes; what a
rank holds in the end is always one box of the global tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatfm.errors import UsageError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a global tensor."""


@dataclass(frozen=True)
class Placement:
    """One parameter under tensor parallelism.

    shape: global. dim: the dim that is cut into `parts`, of which this rank holds `part`; None: whole on every rank.
    uneven: the last part may be smaller than the others.
    partial_gradient: each tensor-parallel rank has only its share of the gradient, to be summed after backward.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    part: int = 0
    parts: int = 1
    partial_gradient: bool = False
    uneven: bool = False

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        size = self.shape[self.dim]
        if self.uneven and self._size * (self.parts - 1) >= size:
            raise UsageError(
                f"parallel.tp = {self.parts} leaves ranks without a part of {self.name} {list(self.shape)}: the "
                f"nearest tp that fits is {next(t for t in range(self.parts, 0, -1) if -(-size // t) * (t - 1) < size)}"
            )
        if not self.uneven and size % self.parts:
            raise UsageError(
                f"parallel.tp = {self.parts} does not divide dim {self.dim} of {self.name} {list(self.shape)}: "
                f"the next size that fits is {-(-size // self.parts) * self.parts}"
            )

    @property
    def box(self) -> Box:
        """What this tensor-parallel rank holds, before FSDP2 cuts it."""
        if self.dim is None:
            return (0,) * len(self.shape), self.shape
        first = self._size * self.part
        size = min(self._size, self.shape[self.dim] - first)
        offsets = tuple(first if dim == self.dim else 0 for dim in range(len(self.shape)))
        sizes = tuple(size if dim == self.dim else full for dim, full in enumerate(self.shape))
        return offsets, sizes

    @property
    def _size(self) -> int:
        """Of every part but perhaps the last."""
        return -(-self.shape[self.dim] // self.parts) if self.dim is not None else 0

    def inside(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
        """The global box of a block of the tensor-parallel shard (FSDP2's part of it)."""
        own = self.box[0]
        return tuple(a + b for a, b in zip(own, offsets, strict=True)), sizes


class Layout(Mapping[str, Placement]):
    """The placements of all parameters of a model, by their global names."""

    def __init__(
        self, placements: Mapping[str, Placement], table: str, buffers: Mapping[str, Placement] | None = None
    ) -> None:
        self._placements = dict(placements)
        self.buffers = dict(buffers or {})
        """Those of the buffers, which are not trained and not stored."""
        self.table = table
        """The plan as it was applied, for people."""

    def __getitem__(self, name: str) -> Placement:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)
