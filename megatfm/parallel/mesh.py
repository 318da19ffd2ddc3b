"""The device mesh: the ranks of a run on named axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatfm import ranks
from megatfm.config import ParallelConfig
from megatfm.config.base import nearest_divisor
from megatfm.errors import UsageError

PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
AXES = (PIPELINE, REPLICATE, SHARD, TENSOR)
"""From the slowest to the fastest: neighbouring ranks, on one node, share an axis of tensor parallelism; pipeline
ranks, which talk least, are farthest apart."""
EXPERT_SHARD, EXPERT = "edp", "ep"
EXPERT_AXES = (EXPERT_SHARD, EXPERT)
FOLDED = (SHARD,)
"""The axes that experts see otherwise: as EXPERT_SHARD × EXPERT. Ranks along EXPERT hold different experts and send
each other their tokens; ranks along EXPERT_SHARD hold the same ones, and ZeRO cuts these over them."""
ORDER = (PIPELINE, REPLICATE, *FOLDED, *EXPERT_AXES, TENSOR)
"""All axes, from the slowest to the fastest."""


@dataclass(frozen=True)
class DataAxes:
    """The axes over which ranks hold the same block of a parameter and see other rows.

    ZeRO cuts the block over `shard`; copies of what is left are on the ranks of `replicate`, if there is such an axis.
    """

    shard: str
    replicate: str | None = None

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes that ZeRO leaves whole."""
        return () if self.replicate is None else (self.replicate,)

    @property
    def all(self) -> tuple[str, ...]:
        """All axes over which gradients are summed, the one that ZeRO cuts over in front."""
        return (self.shard, *self.copies)


DENSE = DataAxes(SHARD, REPLICATE)
"""Of whatever every data rank computes with."""
EXPERTS = DataAxes(EXPERT_SHARD, REPLICATE)
"""Of experts that lie on different ranks."""
OWNERS = (SHARD, TENSOR)
"""Axes over which the blocks of a tensor may lie: those who share out tensors that an optimizer needs whole."""


@dataclass(frozen=True)
class Mesh:
    """A torch DeviceMesh with `AXES`, and what the rooms above ask of it.

    experts: the same ranks, with EXPERT_SHARD and EXPERT in the place of FOLDED; None where every rank holds all
    experts.
    """

    device_mesh: DeviceMesh
    experts: DeviceMesh | None = None

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 for one that divides nothing."""
        if axis == EXPERT and self.experts is None:
            return 1
        mesh = self._having(axis)
        return mesh.size((mesh.mesh_dim_names or ()).index(axis))

    def rank(self, axis: str) -> int:
        """This process's coordinate along an axis, from 0."""
        return self._having(axis).get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one along that axis alone, itself included."""
        if axis == EXPERT and self.size(EXPERT_SHARD) == 1:  # the same ranks, so the same group
            return self.flat_group(FOLDED)
        return self._having(axis).get_group(axis)

    @property
    def data_ranks(self) -> int:
        """Over how many ranks a global batch is divided."""
        return self.size(REPLICATE) * self.size(SHARD)

    @property
    def data_rank(self) -> int:
        """Which of the `data_ranks` shares of a global batch is read here, from 0; replicas are the slower axis."""
        return self.rank(REPLICATE) * self.size(SHARD) + self.rank(SHARD)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which a global batch is divided."""
        return DENSE.all

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which the sums of a loss's terms are still to be added up."""
        return (*self.data_axes, PIPELINE)

    @property
    def in_summing_order(self) -> tuple[str, ...]:
        """All axes, as what is summed over several goes through them one by one."""
        return (*self.loss_axes, *(axis for axis in self._axes if axis not in self.loss_axes))

    def sharding(self, data: DataAxes) -> DeviceMesh:
        """The axes that FSDP2 may see: replicate × shard, or shard alone."""
        mesh = self._having(data.shard)
        if data.replicate is not None and self.size(data.replicate) > 1:
            return mesh[data.replicate, data.shard]
        return mesh[data.shard]

    def sum(self, tensor: Tensor, axes: Sequence[str]) -> None:
        """Sum a tensor in place over the ranks of some axes."""
        for axis in axes:
            if self.size(axis) > 1:
                dist.all_reduce(tensor, group=self.group(axis))

    def flat_group(self, axes: Sequence[str]) -> ProcessGroup:
        """The ranks of several axes as one group, made once; the axis's own where only one has several. Of axes that
        lie in others only these count."""
        outer = [axis for axis in axes if axis not in EXPERT_AXES or not set(axes).issuperset(FOLDED)]
        long = [axis for axis in outer if self.size(axis) > 1]
        if len(long) <= 1:
            return self.group(long[0] if long else outer[0])
        ordered = in_order(outer)
        return self._having(*ordered)[ordered]._flatten("_".join(ordered)).get_group()

    def group_names(self, *several: Sequence[str]) -> dict[str, str]:
        """Name of each axis's process group → the axis, and of the flat groups of several axes. A collective."""
        names = {str(self.flat_group(axes).group_name): " × ".join(in_order(axes)) for axes in several}
        # One of several axes may be the same group as the axis alone: then the axis names it.
        if self.experts is not None:
            axes = self.experts.mesh_dim_names or ()
            names |= {str(self.experts.get_group(axis).group_name): axis for axis in axes}
        return names | {str(self.group(axis).group_name): axis for axis in AXES}

    def gather_objects(self, item: Any, axes: Sequence[str]) -> list[Any]:
        """The items of all ranks of `flat_group(axes)`, in its order."""
        return ranks.gather(item, self.flat_group(axes))

    def describe(self) -> str:
        """The sizes of the axes in words, the pipeline's and the experts' only where there are such."""
        experts = f", experts over {EXPERT} {self.size(EXPERT)} of it" if self.experts is not None else ""
        sizes = describe_sizes({axis: self.size(axis) for axis in AXES})
        return sizes.replace(f"{SHARD} {self.size(SHARD)}", f"{SHARD} {self.size(SHARD)}{experts}")

    @property
    def _axes(self) -> tuple[str, ...]:
        """All axes that there are, the slowest first."""
        return AXES if self.experts is None else (*AXES, *EXPERT_AXES)

    def _having(self, *axes: str) -> DeviceMesh:
        """The mesh that has these axes."""
        if self.experts is not None and not set(axes).isdisjoint(EXPERT_AXES):
            return self.experts
        return self.device_mesh


def in_order(axes: Iterable[str]) -> tuple[str, ...]:
    """Axes in the mesh's own order, the slowest first."""
    wanted = set(axes)
    return tuple(axis for axis in ORDER if axis in wanted)


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """A layout in words; a pipeline only where there is one."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != PIPELINE or size > 1)


def axis_sizes(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """Size of each axis, dp_shard = −1 filled in. Raises UsageError when the product is not the world size."""
    fixed = config.pp * config.dp_replicate * config.tp
    shard = world_size // fixed if config.dp_shard == -1 else config.dp_shard
    sizes = {PIPELINE: config.pp, REPLICATE: config.dp_replicate, SHARD: shard, TENSOR: config.tp}
    if math.prod(sizes.values()) != world_size:
        wanted = describe_sizes({k: size for k, size in sizes.items() if k != SHARD or config.dp_shard != -1})
        step = fixed if config.dp_shard == -1 else fixed * shard
        nearest = step if config.dp_shard != -1 else max(1, round(world_size / step)) * step
        raise UsageError(
            f"the layout {wanted} does not fit {world_size} process{'es' * (world_size > 1)}: start {nearest}, "
            "or change parallel.tp, parallel.pp, parallel.dp_replicate or parallel.dp_shard"
        )
    if shard % config.ep:
        raise UsageError(
            f"parallel.ep = {config.ep} does not divide the {shard} ranks of parallel.dp_shard, over which experts "
            f"lie: the nearest that does is {nearest_divisor(shard, config.ep)}"
        )
    return sizes


def build_mesh(config: ParallelConfig, world_size: int, device_type: str) -> Mesh:
    """The mesh of a layout over all ranks of the default process group. Raises UsageError if it doesn't fit."""
    sizes = axis_sizes(config, world_size)
    mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    if config.ep == 1:
        return Mesh(mesh)
    folded = math.prod(sizes[axis] for axis in FOLDED)
    sizes |= {EXPERT_SHARD: folded // config.ep, EXPERT: config.ep}
    axes = tuple(axis for axis in ORDER if axis not in FOLDED)
    return Mesh(mesh, init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes))
