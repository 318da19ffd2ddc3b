"""The device mesh: the ranks of a run on named axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatfm import object_collectives
from megatfm.config import ParallelConfig
from megatfm.config.world_size import compute_axis_sizes, describe_sizes

T = TypeVar("T")

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"
AXES = (PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR)
"""From the slowest to the fastest. Tensor-parallel ranks are neighbours, so they share a node; context-parallel ranks
come next; pipeline ranks, which communicate least, are farthest apart."""
EXPERT_SHARD, EXPERT = "edp", "ep"
EXPERT_AXES = (EXPERT_SHARD, EXPERT)
EXPERT_FOLD_AXES = (SHARD, CONTEXT)
"""The axes that EXPERT_SHARD × EXPERT replace for experts. Ranks along EXPERT hold different experts and exchange
tokens; ranks along EXPERT_SHARD hold the same experts, which ZeRO shards over them. TENSOR may be folded in too
(`parallel.expert_tp`)."""
ALL_AXES = (PIPELINE, REPLICATE, SHARD, *EXPERT_AXES, CONTEXT, TENSOR)
"""All axes, from the slowest to the fastest."""


Position = Mapping[str, int]
"""A rank's coordinate along each axis, from 0."""


@dataclass(frozen=True)
class DataAxes:
    """Axes whose ranks hold the same block of a parameter and process other rows, or other parts of rows.

    ZeRO shards the block over all ranks of `shard`, along whose first axis the index of a shard changes slowest; the
    ranks of `replicate` (None: no such axis) hold copies.
    """

    shard: tuple[str, ...]
    replicate: str | None = None

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """The data axes over which ZeRO doesn't shard."""
        return () if self.replicate is None else (self.replicate,)

    @property
    def all(self) -> tuple[str, ...]:
        """All axes over which gradients are summed, those of ZeRO first."""
        return (*self.shard, *self.replicate_axes)


@dataclass(frozen=True)
class RowReaders:
    """Context-parallel ranks that need the same rows: each reads some and broadcasts them to the others
    (`megatfm.data.loader.ReaderGroup`)."""

    rank: int
    count: int
    group: ProcessGroup

    def all_gather(self, local_rows: T, n_readers: int) -> list[T]:
        """Broadcast the rows of the first `n_readers` ranks to all ranks."""
        return object_collectives.broadcast_each(local_rows, n_readers, self.group)


DENSE_DATA_AXES = DataAxes((SHARD, CONTEXT), REPLICATE)
"""Data axes of all parameters except experts under expert parallelism."""
EXPERT_DATA_AXES = DataAxes((EXPERT_SHARD,), REPLICATE)
"""Data axes of experts under expert parallelism."""


@dataclass(frozen=True)
class Mesh:
    """A torch DeviceMesh with `AXES`, and the ranks, groups and reductions derived from it.

    expert_mesh: the same ranks with EXPERT_SHARD and EXPERT instead of the folded axes; None without expert
    parallelism. expert_tp: see `parallel.expert_tp`.
    """

    device_mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    expert_tp: str = "by_expert"

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for an unused axis."""
        if axis == EXPERT and self.expert_mesh is None:
            return 1
        mesh = self._find_mesh(axis)
        return mesh.size((mesh.mesh_dim_names or ()).index(axis))

    def rank(self, axis: str) -> int:
        """Return this process's coordinate along an axis, from 0."""
        return self._find_mesh(axis).get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return this rank's process group along one axis: the ranks that differ only in that coordinate."""
        if axis == EXPERT and self.size(EXPERT_SHARD) == 1:
            folded = list_axes_folded_into_ep(self.expert_tp)
            nontrivial = [folded_axis for folded_axis in folded if self.size(folded_axis) > 1]
            if len(nontrivial) == 1:  # the same ranks, so the same group
                return self.group(nontrivial[0])
        return self._find_mesh(axis).get_group(axis)

    @cached_property
    def position(self) -> Position:
        """This process's coordinates along all axes."""
        return {axis: self.rank(axis) for axis in self._axes}

    def positions(self, axes: Sequence[str]) -> list[Position]:
        """Return coordinates along all axes of the ranks of `flat_group(axes)`, in the order of its ranks."""
        meshes = [mesh for mesh in (self.device_mesh, self.expert_mesh) if mesh is not None]
        positions: list[Position] = []
        for rank in dist.get_process_group_ranks(self.flat_group(axes)):
            coordinates: dict[str, int] = {}
            for mesh in meshes:  # ranks are numbered along the last dim first
                indices = np.unravel_index(rank, tuple(mesh.mesh.shape))
                coordinates |= zip(mesh.mesh_dim_names or (), map(int, indices), strict=True)
            positions.append(coordinates)
        return positions

    @property
    def data_ranks(self) -> int:
        """Number of ranks over which a global batch is divided."""
        return self.size(REPLICATE) * self.size(SHARD)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share among the `data_ranks` of a global batch, from 0; replicas are the slower axis."""
        return self.rank(REPLICATE) * self.size(SHARD) + self.rank(SHARD)

    @property
    def row_readers(self) -> RowReaders:
        """The ranks that process the same rows, and share the reading."""
        return RowReaders(self.rank(CONTEXT), self.size(CONTEXT), self.group(CONTEXT))

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which a gradient is summed: data-parallel × context-parallel ranks."""
        return self.data_ranks * self.size(CONTEXT)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which a global batch is divided."""
        return (SHARD, REPLICATE)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which the local sums of the loss terms are reduced."""
        return (*self.batch_axes, CONTEXT, PIPELINE)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which a parameter may be sharded. The ranks along them divide whole-tensor optimizer work
        (Muon)."""
        return (SHARD, CONTEXT, TENSOR)

    @property
    def reduction_order(self) -> tuple[str, ...]:
        """Order in which a sum over several axes is reduced, the same on all ranks."""
        return (*self.loss_axes, *(axis for axis in self._axes if axis not in self.loss_axes))

    def count_shards(self, data: DataAxes) -> int:
        """Return the number of ranks over which ZeRO shards a parameter with these data axes."""
        return math.prod(map(self.size, data.shard))

    def get_shard_index(self, data: DataAxes, position: Position | None = None) -> int:
        """Return the index of a rank's shard among `count_shards`. position: the rank's; None: this process's."""
        position, index = position or self.position, 0
        for axis in data.shard:
            index = index * self.size(axis) + position[axis]
        return index

    def fsdp_mesh(self, data: DataAxes) -> DeviceMesh:
        """Return the mesh for FSDP2: replicas × shards (HSDP), or shards alone."""
        mesh = self._find_mesh(*data.shard)
        replicas = [axis for axis in data.replicate_axes if self.size(axis) > 1]
        shard_axes = [axis for axis in data.shard if self.size(axis) > 1] or [data.shard[0]]
        if len(shard_axes) == 1:
            return mesh[*replicas, shard_axes[0]]
        shards = self._flatten(shard_axes)
        return DeviceMesh._concatenate([mesh[replicas[0]], shards]) if replicas else shards

    def all_reduce_(self, tensor: Tensor, axes: Sequence[str]) -> None:
        """Sum a tensor in place over the ranks of some axes."""
        for axis in axes:
            if self.size(axis) > 1:
                dist.all_reduce(tensor, group=self.group(axis))

    def flat_group(self, axes: Sequence[str]) -> ProcessGroup:
        """Return one process group over several axes (cached); if a single one has several ranks, its own group.

        Expert axes together with one of the axes that they are folded from stand for all the folded axes.
        """
        outer, expert_axes = set(axes).difference(EXPERT_AXES), set(axes).intersection(EXPERT_AXES)
        if expert_axes and not outer.isdisjoint(list_axes_folded_into_ep(self.expert_tp)):
            outer |= set(list_axes_folded_into_ep(self.expert_tp))
        else:
            outer |= expert_axes
        nontrivial = [axis for axis in sort_axes(outer) if self.size(axis) > 1]
        if len(nontrivial) <= 1:
            return self.group(nontrivial[0] if nontrivial else sort_axes(outer)[0])
        return self._flatten(nontrivial).get_group()

    def create_group_along(self, axis: str) -> ProcessGroup:
        """Create a second group of the ranks of `group(axis)`, with its own communicator, so that its collectives don't
        queue behind those of the first. A collective of all ranks; each call creates another group."""
        mesh = self._find_mesh(axis)
        dim = (mesh.mesh_dim_names or ()).index(axis)
        return create_group_of(mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist())

    def group_names(self, *axis_sets: Sequence[str]) -> dict[str, str]:
        """Return process group name → axis, or axes joined by " × ". axis_sets: axes of flat groups. A collective."""
        names = {
            str(self.flat_group(axes).group_name): " × ".join(axis for axis in sort_axes(axes) if self.size(axis) > 1)
            for axes in axis_sets
        }
        # One of several axes may be the same group as the axis alone: then the axis names it.
        if self.expert_mesh is not None:
            axes = self.expert_mesh.mesh_dim_names or ()
            names |= {str(self.expert_mesh.get_group(axis).group_name): axis for axis in axes}
        return names | {str(self.group(axis).group_name): axis for axis in AXES}

    def gather_objects(self, item: Any, axes: Sequence[str]) -> list[Any]:
        """All-gather objects over `flat_group(axes)`, in the order of its ranks."""
        return object_collectives.all_gather_object(item, self.flat_group(axes))

    def describe(self) -> str:
        """Format the axis sizes as text, such as "dp_shard 4 × tp 2"; pp, cp and ep only if larger than 1."""
        sizes = describe_sizes({axis: self.size(axis) for axis in AXES})
        return sizes if self.expert_mesh is None else f"{sizes}, experts over {self.size(EXPERT)} of them"

    @property
    def _axes(self) -> tuple[str, ...]:
        """All axes that there are, the slowest first."""
        return AXES if self.expert_mesh is None else (*AXES, *EXPERT_AXES)

    def _flatten(self, axes: Sequence[str]) -> DeviceMesh:
        """Return the mesh of several axes as one dim (cached by torch). axes: sorted, each of several ranks."""
        return self._find_mesh(*axes)[*axes]._flatten("_".join(axes))

    def _find_mesh(self, *axes: str) -> DeviceMesh:
        """Return the mesh that has these axes."""
        if self.expert_mesh is not None and not set(axes).isdisjoint(EXPERT_AXES):
            return self.expert_mesh
        return self.device_mesh


def create_group_of(groups: list[list[int]], other_groups: list[list[int]] | None = None) -> ProcessGroup:
    """Create process groups, and return this rank's. A collective of all ranks.

    groups: ranks of each. other_groups: the same for all ranks that are in none of these, which may get one of them.
    On GPUs one call splits the default group, as DeviceMesh does. A call for each group would be a collective of all
    ranks, too: hundreds of them on a thousand GPUs.
    """
    default_group = dist.group.WORLD
    group: ProcessGroup | None
    if default_group and default_group.bound_device_id is not None and torch.accelerator.is_available():
        group = dist.split_group(split_ranks=[*groups, *(other_groups or ())])
    else:
        group, _ = dist.new_subgroups_by_enumeration(groups)
    return cast(ProcessGroup, group)


def sort_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Sort axes by the order of the mesh, the slowest first."""
    axis_set = set(axes)
    return tuple(axis for axis in ALL_AXES if axis in axis_set)


def list_axes_folded_into_ep(expert_tp: str) -> tuple[str, ...]:
    """Return the axes from which expert parallelism takes its ranks."""
    return (*EXPERT_FOLD_AXES, TENSOR) if expert_tp == "folded" else EXPERT_FOLD_AXES


def build_mesh(config: ParallelConfig, world_size: int, device_type: str) -> Mesh:
    """Build the mesh over all ranks of the default process group. Raises UsageError if the layout doesn't fit."""
    sizes = compute_axis_sizes(config, world_size)
    mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    if config.ep == 1:
        return Mesh(mesh, expert_tp=config.expert_tp)
    folded_axes = list_axes_folded_into_ep(config.expert_tp)
    sizes |= {EXPERT_SHARD: math.prod(sizes[axis] for axis in folded_axes) // config.ep, EXPERT: config.ep}
    axes = tuple(axis for axis in ALL_AXES if axis not in folded_axes)
    experts = init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
    return Mesh(mesh, experts, config.expert_tp)
