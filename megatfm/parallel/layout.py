"""The layout of a model on its ranks: which block of each parameter a rank holds, and over which axes to sum gradients.

Model axes (tp, ep) leave plain local tensors. Data axes may shard these further (ZeRO). In the end a rank holds one
rectangular block of the global tensor. The last functions are for other packages: the blocks of a model, and a way to
replace a module's forward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatfm.errors import UsageError
from megatfm.parallel.context_parallel import ContextParallel
from megatfm.parallel.mesh import DENSE_DATA_AXES, DataAxes, Mesh, Position

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block inside a tensor."""


@dataclass(frozen=True)
class Shard:
    """A dim that is divided over the ranks of an axis. index: this rank's shard. uneven: the last may be smaller."""

    axis: str
    dim: int
    index: int
    count: int
    uneven: bool = False


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one parameter or buffer.

    shape: global. shards: over model axes, in the order of application; empty if replicated. partial_axes: axes over
    which the gradient is partial, to be summed after the backward pass. data_axes: axes whose ranks hold the same block
    and see other rows. fsdp_dim: the dim that ZeRO 2 and 3 shard.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    partial_axes: tuple[str, ...] = ()
    data_axes: DataAxes = DENSE_DATA_AXES
    fsdp_dim: int = 0

    def __post_init__(self) -> None:
        for i, shard in enumerate(self.shards):
            size = self._narrow(i)[1][shard.dim]
            per_rank = -(-size // shard.count)
            outer = -(-self.shape[shard.dim] // size)
            if shard.uneven and per_rank * (shard.count - 1) >= size:
                fits = next(t for t in range(shard.count, 0, -1) if -(-size // t) * (t - 1) < size)
                raise UsageError(
                    f"parallel.{shard.axis} = {shard.count} leaves ranks without a shard of {self.name} "
                    f"{list(self.shape)}: the nearest {shard.axis} that fits is {fits}"
                )
            if not shard.uneven and size % shard.count:
                raise UsageError(
                    f"parallel.{shard.axis} = {shard.count} does not divide dim {shard.dim} of {self.name} "
                    f"{list(self.shape)}: the next size that fits is {per_rank * shard.count * outer}"
                )

    @property
    def axes(self) -> frozenset[str]:
        """Model axes over which ranks hold different blocks."""
        return frozenset(shard.axis for shard in self.shards)

    def has_same_shards(self, other: "TensorLayout") -> bool:
        """Return whether the same axes shard the same dims."""
        return [(shard.axis, shard.dim) for shard in self.shards] == [(shard.axis, shard.dim) for shard in other.shards]

    @property
    def region(self) -> Region:
        """Offsets and sizes of this rank's block, before data axes shard it."""
        return self._narrow(len(self.shards))

    def compute_local_region(self, mesh: Mesh, zero_dim: int | None) -> Region:
        """Return offsets and sizes of this rank's block. zero_dim: the dim that ZeRO shards; None: it does not."""
        return self.compute_regions(mesh, zero_dim, [mesh.position])[0]

    def compute_regions(self, mesh: Mesh, zero_dim: int | None, positions: Sequence[Position]) -> list[Region]:
        """Return the blocks of ranks at some positions on the mesh. zero_dim: as for `compute_local_region`."""
        axes = [*(shard.axis for shard in self.shards), *(() if zero_dim is None else self.data_axes.shard)]
        n_zero_shards = mesh.count_shards(self.data_axes)
        region_by_key: dict[tuple[int, ...], Region] = {}
        regions = []
        for position in positions:
            key = tuple(position[axis] for axis in axes)
            if key not in region_by_key:
                shards = tuple(replace(shard, index=position[shard.axis]) for shard in self.shards)
                region = replace(self, shards=shards).region
                if zero_dim is not None:
                    index = mesh.get_shard_index(self.data_axes, position)
                    region = shard_rows(region, zero_dim, index, n_zero_shards)
                region_by_key[key] = region
            regions.append(region_by_key[key])
        return regions

    def _narrow(self, n_shards: int) -> Region:
        """Return offsets and sizes after the first `n_shards` shards."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for shard in self.shards[:n_shards]:
            per_rank = -(-sizes[shard.dim] // shard.count)
            first = per_rank * shard.index
            offsets[shard.dim] += first
            sizes[shard.dim] = min(per_rank, sizes[shard.dim] - first)
        return tuple(offsets), tuple(sizes)


def shard_rows(region: Region, dim: int, index: int, count: int) -> Region:
    """Return the shard of a block that ZeRO gives to one of `count` ranks: ⌈rows / count⌉ rows, the last ones fewer."""
    offsets, sizes = map(list, region)
    per_rank = -(-sizes[dim] // count)
    first = min(per_rank * index, sizes[dim])
    offsets[dim] += first
    sizes[dim] = min(per_rank, sizes[dim] - first)
    return tuple(offsets), tuple(sizes)


class ModelLayout(Mapping[str, TensorLayout]):
    """Layouts of all parameters of a model, by their global names."""

    def __init__(
        self,
        layouts: Mapping[str, TensorLayout],
        table: str,
        buffers: Mapping[str, TensorLayout] | None = None,
        state: Iterable[str] = (),
        cp: ContextParallel | None = None,
    ) -> None:
        self._layouts = dict(layouts)
        self.buffers = dict(buffers or {})
        """Layouts of the buffers, which are not trained."""
        self.state = {name: self.buffers[name] for name in state}
        """Layouts of the persistent buffers, which checkpoints hold."""
        self.context_parallel = cp
        """Split of rows over context-parallel ranks; None without context parallelism."""
        self.table = table
        """The applied plan as text."""

    def __getitem__(self, name: str) -> TensorLayout:
        return self._layouts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)


def iter_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of all stacks, the units of compilation, FSDP wrapping and recomputation."""
    for path, module in model.named_modules():
        if path.rpartition(".")[0].rpartition(".")[2] == "layers":
            yield module


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of this module alone; its hooks still run."""
    vars(module)["forward"] = forward
