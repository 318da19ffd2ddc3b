"""The layout of a model on its ranks: where each parameter's elements are, and over which axes gradients are summed.

What the axes of a model cut off are plain local tensors. The data axes may cut these once more (ZeRO); what a rank
holds in the end is always one box of the global tensor. At the end stands how other rooms reach into a laid-out model:
its blocks, and a module's replaced forward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatfm.errors import UsageError
from megatfm.parallel.context_parallel import ContextParallel
from megatfm.parallel.mesh import DENSE_DATA_AXES, DataAxes

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a global tensor."""


@dataclass(frozen=True)
class Shard:
    """A dim of a tensor, divided over the ranks of an axis. index: this rank's. uneven: the last may be smaller."""

    axis: str
    dim: int
    index: int
    count: int
    uneven: bool = False


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one parameter or buffer.

    shape: global. shards: by the axes of the model, in the order in which they are applied; empty: on every rank whole.
    partial_axes: axes whose ranks have only their share of the gradient each, to be summed after the backward pass.
    data_axes: the axes over which ranks hold the same block and see other rows. fsdp_dim: where ZeRO 2 and 3 cut it.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    partial_axes: tuple[str, ...] = ()
    data_axes: DataAxes = DENSE_DATA_AXES
    fsdp_dim: int = 0

    def __post_init__(self) -> None:
        for i, cut in enumerate(self.shards):
            size = self._narrowed(i)[1][cut.dim]
            per_rank = -(-size // cut.count)
            outer = -(-self.shape[cut.dim] // size)
            if cut.uneven and per_rank * (cut.count - 1) >= size:
                fits = next(t for t in range(cut.count, 0, -1) if -(-size // t) * (t - 1) < size)
                raise UsageError(
                    f"parallel.{cut.axis} = {cut.count} leaves ranks without a part of {self.name} {list(self.shape)}: "
                    f"the nearest {cut.axis} that fits is {fits}"
                )
            if not cut.uneven and size % cut.count:
                raise UsageError(
                    f"parallel.{cut.axis} = {cut.count} does not divide dim {cut.dim} of {self.name} "
                    f"{list(self.shape)}: the next size that fits is {per_rank * cut.count * outer}"
                )

    @property
    def axes(self) -> frozenset[str]:
        """Axes whose ranks hold different blocks, before the data axes cut them."""
        return frozenset(cut.axis for cut in self.shards)

    def has_same_shards(self, other: "TensorLayout") -> bool:
        """Whether the same axes cut the same dims."""
        return [(cut.axis, cut.dim) for cut in self.shards] == [(cut.axis, cut.dim) for cut in other.shards]

    @property
    def region(self) -> Chunk:
        """The block on this rank, before the data axes cut it."""
        return self._narrowed(len(self.shards))

    def subregion(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        """The global box of a block within `region` (ZeRO's part of it)."""
        return tuple(a + b for a, b in zip(self.region[0], offsets, strict=True)), sizes

    def _narrowed(self, cuts: int) -> Chunk:
        """The block that the first `cuts` shards leave."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for cut in self.shards[:cuts]:
            per_rank = -(-sizes[cut.dim] // cut.count)
            first = per_rank * cut.index
            offsets[cut.dim] += first
            sizes[cut.dim] = min(per_rank, sizes[cut.dim] - first)
        return tuple(offsets), tuple(sizes)


class ModelLayout(Mapping[str, TensorLayout]):
    """Layouts of all parameters of a model, by their global names."""

    def __init__(
        self,
        placements: Mapping[str, TensorLayout],
        table: str,
        buffers: Mapping[str, TensorLayout] | None = None,
        state: Iterable[str] = (),
        contexts: ContextParallel | None = None,
    ) -> None:
        self._placements = dict(placements)
        self.buffers = dict(buffers or {})
        """Layouts of the buffers, which are not trained."""
        self.state = {name: self.buffers[name] for name in state}
        """Layouts of the buffers that a checkpoint holds: state of modules, which doesn't follow from the config."""
        self.context_parallel = contexts
        """Split of rows over ranks; None if they are not split."""
        self.table = table
        """The plan as it was applied, for people."""

    def __getitem__(self, name: str) -> TensorLayout:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)


def transformer_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of all stacks: what is compiled, gathered and recomputed as one."""
    for path, module in model.named_modules():
        if path.rpartition(".")[0].rpartition(".")[2] == "layers":
            yield module


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have `module(*inputs)` run `forward(*inputs)`, with the module's hooks around it; no other module changes."""
    vars(module)["forward"] = forward
