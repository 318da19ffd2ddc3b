"""The layout table: where each parameter's elements are, and over which axes its gradient is still to be summed.

What the axes of a model cut off are plain local tensors. The data axes may cut these once more (ZeRO); what a rank
holds in the end is always one box of the global tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatfm.errors import UsageError
from megatfm.parallel.context_exchange import Contexts
from megatfm.parallel.mesh import DENSE, DataAxes

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a global tensor."""


@dataclass(frozen=True)
class Cut:
    """A dim of a tensor, divided over the ranks of an axis. part: this rank's. uneven: the last may be smaller."""

    axis: str
    dim: int
    part: int
    parts: int
    uneven: bool = False


@dataclass(frozen=True)
class Placement:
    """Where one parameter or buffer is.

    shape: global. cuts: by the axes of the model, each inside what those before it leave; none: whole on every rank.
    sum_over: axes whose ranks have only their share of the gradient each, to be summed after the backward pass.
    data: the axes over which ranks hold the same block and see other rows. data_dim: where ZeRO 2 and 3 cut it.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    sum_over: tuple[str, ...] = ()
    data: DataAxes = DENSE
    data_dim: int = 0

    def __post_init__(self) -> None:
        for i, cut in enumerate(self.cuts):
            size = self._narrowed(i)[1][cut.dim]
            each = -(-size // cut.parts)
            outer = -(-self.shape[cut.dim] // size)
            if cut.uneven and each * (cut.parts - 1) >= size:
                fits = next(t for t in range(cut.parts, 0, -1) if -(-size // t) * (t - 1) < size)
                raise UsageError(
                    f"parallel.{cut.axis} = {cut.parts} leaves ranks without a part of {self.name} {list(self.shape)}: "
                    f"the nearest {cut.axis} that fits is {fits}"
                )
            if not cut.uneven and size % cut.parts:
                raise UsageError(
                    f"parallel.{cut.axis} = {cut.parts} does not divide dim {cut.dim} of {self.name} "
                    f"{list(self.shape)}: the next size that fits is {each * cut.parts * outer}"
                )

    @property
    def axes(self) -> frozenset[str]:
        """Axes whose ranks hold different blocks, before the data axes cut them."""
        return frozenset(cut.axis for cut in self.cuts)

    def is_cut_like(self, other: "Placement") -> bool:
        """Whether the same axes cut the same dims."""
        return [(cut.axis, cut.dim) for cut in self.cuts] == [(cut.axis, cut.dim) for cut in other.cuts]

    @property
    def region(self) -> Region:
        """What this rank holds, before the data axes cut it."""
        return self._narrowed(len(self.cuts))

    def inside(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Region:
        """The global box of a block of what this rank holds (ZeRO's part of it)."""
        own = self.region[0]
        return tuple(a + b for a, b in zip(own, offsets, strict=True)), sizes

    def _narrowed(self, cuts: int) -> Region:
        """What the first cuts leave."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for cut in self.cuts[:cuts]:
            each = -(-sizes[cut.dim] // cut.parts)
            first = each * cut.part
            offsets[cut.dim] += first
            sizes[cut.dim] = min(each, sizes[cut.dim] - first)
        return tuple(offsets), tuple(sizes)


class ParameterLayout(Mapping[str, Placement]):
    """The placements of all parameters of a model, by their global names."""

    def __init__(
        self,
        placements: Mapping[str, Placement],
        table: str,
        buffers: Mapping[str, Placement] | None = None,
        state: Iterable[str] = (),
        contexts: Contexts | None = None,
    ) -> None:
        self._placements = dict(placements)
        self.buffers = dict(buffers or {})
        """Those of the buffers, which are not trained."""
        self.state = {name: self.buffers[name] for name in state}
        """Of these the ones that a checkpoint holds: state of modules, which doesn't follow from the config."""
        self.contexts = contexts
        """How rows are cut over ranks, where they are."""
        self.table = table
        """The plan as it was applied, for people."""

    def __getitem__(self, name: str) -> Placement:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)
