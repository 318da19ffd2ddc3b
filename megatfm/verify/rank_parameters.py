"""What a rank holds of a model's parameters under a layout, worked out without a process group."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import nn

from megatfm.config import ParallelConfig
from megatfm.verify.axes import EXPERT_SHARD, SHARD, MeshPosition
from megatfm.verify.expected_pipeline import Stages
from megatfm.verify.module_cuts import ModuleCut

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankParameters:
    """What a rank holds of the plain model's parameters. cuts: module path → how it is cut."""

    model: nn.Module
    cuts: Mapping[str, ModuleCut]
    pipeline: Stages | None
    position: MeshPosition
    parallel: ParallelConfig

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Before the data axes cut them, of the parameters that this pipeline rank's stages use."""
        return {
            name: self.shape_at(name, self.position)
            for name, _ in self.model.named_parameters()
            if self.pipeline is None or self.position.pp in self.pipeline.holders[name]
        }

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters held here that have gradients."""
        return [name for name in self.shapes if self.model.get_parameter(name).requires_grad]

    def shape_at(self, name: str, place: MeshPosition) -> Shape:
        """What a rank holds before the data axes cut it."""
        shape = list(self.model.get_parameter(name).shape)
        if self.is_expert(name):
            shape[0] //= self.parallel.ep
        dim, parts = self._cut_dim(name), self.parallel.tp
        if dim is not None and parts > 1:
            each = -(-shape[dim] // parts)
            shape[dim] = max(0, min(each, shape[dim] - each * place.tp))
        return tuple(shape)

    def is_expert(self, name: str) -> bool:
        """Whether expert parallelism lays blocks of the parameter on different ranks."""
        return self.parallel.ep > 1 and self._cut(name).are_experts

    def shard_axis(self, name: str) -> str:
        """The axis over which ZeRO cuts the parameter."""
        return EXPERT_SHARD if self.is_expert(name) else SHARD

    def shards(self, name: str) -> int:
        """Ranks along that axis."""
        return (
            self.parallel.expert_mesh_size // self.parallel.ep
            if self.is_expert(name)
            else self.parallel.dp_shard
        )

    @property
    def zero(self) -> int:
        """The stage; 0 where there is nobody to share with."""
        return self.parallel.zero if self.parallel.dp_shard * self.parallel.dp_replicate > 1 else 0

    def block(self, name: str, place: MeshPosition) -> tuple[int, ...]:
        """Which of a parameter's blocks a rank holds: the same for all that hold the same one."""
        part = place.edp if self.is_expert(name) else place.shard
        return (
            place.ep if self.is_expert(name) else 0,
            place.tp if self.is_cut(name) else 0,
            part if self.zero else 0,
        )

    def is_cut(self, name: str) -> bool:
        """Whether tensor parallelism lays blocks of the parameter on different ranks, rather than copies."""
        return self.parallel.tp > 1 and self._cut_dim(name) is not None

    def is_partial(self, name: str) -> bool:
        """Whether each tensor-parallel rank has only its share of the gradient."""
        return self.is_partial_style(self._cut(name)) and not self.is_cut(name)

    def is_partial_style(self, cut: ModuleCut) -> bool:
        """Whether what a tensor-parallel rank computes in a module is its share only."""
        partial = cut.gradient == "partial"
        return self.parallel.tp > 1 and (
            partial or (cut.gradient == "sequence" and self.parallel.sequence_parallel)
        )

    def local_numel(self, name: str, place: MeshPosition | None = None) -> int:
        """Elements of the block that is a rank's, by default this one's, after the data axes cut it."""
        place = place or self.position
        shape, parts = self.shape_at(name, place), self.shards(name) if self.zero else 1
        size = shape[self._data_dim(name)]
        each, part = -(-size // parts), place.edp if self.is_expert(name) else place.shard
        return max(0, min(each, size - each * (part if parts > 1 else 0))) * (prod(shape) // size)

    def padded_numel(self, name: str) -> int:
        """Elements when each data rank's rows are filled up to equally many."""
        shape, ranks = self.shapes[name], self.shards(name)
        size = shape[self._data_dim(name)]
        return ranks * -(-size // ranks) * (prod(shape) // size)

    def _data_dim(self, name: str) -> int:
        """Where the data axes cut: within experts, under ZeRO 2 and 3, where their number can't be divided."""
        if not self._cut(name).are_experts or self.zero < 2:
            return 0
        (experts, *inner), ranks = self.shape_at(name, self.position), self.shards(name)
        return 1 if experts % ranks and inner and inner[0] % ranks == 0 else 0

    def _cut_dim(self, name: str) -> int | None:
        return self._cut(name).cut_dim(name.rpartition(".")[2], self.model.get_parameter(name).dim())

    def _cut(self, name: str) -> ModuleCut:
        return self.cuts[name.rpartition(".")[0]]
