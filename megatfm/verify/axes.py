"""Axes of a layout, their sizes and how rank numbers run through them, by the documented order alone.

What is expected is computed here and in the `expected_*` files, without `megatfm.parallel` and `megatfm.layers`, with
which it is compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from megatfm.config import ParallelConfig

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"
EXPERT_SHARD, EXPERT = "edp", "ep"
ORDER = (PIPELINE, REPLICATE, SHARD, EXPERT_SHARD, EXPERT, CONTEXT, TENSOR)
"""From the slowest to the fastest, as groups of several axes are named."""


def single_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Axis → ranks."""
    return {
        PIPELINE: parallel.pp,
        REPLICATE: parallel.dp_replicate,
        SHARD: parallel.dp_shard,
        EXPERT_SHARD: parallel.expert_mesh_size // parallel.ep,
        EXPERT: parallel.ep,
        CONTEXT: parallel.cp,
        TENSOR: parallel.tp,
    }


def sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Axis, or axes joined by ` × ` → ranks."""
    single = single_sizes(parallel)
    axis_groups = [axes for count in (2, 3) for axes in combinations(ORDER, count)]
    return single | {" × ".join(axes): prod(single[axis] for axis in axes) for axes in axis_groups}


def joined(axis_sizes: Mapping[str, int], *axes: str) -> str:
    """Name of the group of several axes: of those that have more than one rank."""
    return " × ".join(axis for axis in axes if axis_sizes[axis] > 1) or axes[0]


@dataclass(frozen=True)
class MeshPosition:
    """Coordinates of a rank on the axes by which ranks differ in what they hold."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    parallel: ParallelConfig

    @classmethod
    def of(cls, rank: int, parallel: ParallelConfig) -> "MeshPosition":
        """Coordinates of a rank: neighbours differ in tensor parallelism, then context, data, pipeline."""
        above, tp = divmod(rank, parallel.tp)
        above, cp = divmod(above, parallel.cp)
        above, shard = divmod(above, parallel.dp_shard)
        pp, replicate = divmod(above, parallel.dp_replicate)
        return cls(pp, replicate, shard, cp, tp, parallel)

    @property
    def data_rank(self) -> int:
        """Share of the global batch that the rank reads; replicas are the slower axis."""
        return self.replicate * self.parallel.dp_shard + self.shard

    @property
    def ep(self) -> int:
        """Number among the ranks that divide experts."""
        return self._folded % self.parallel.ep

    @property
    def edp(self) -> int:
        """Number among the ranks that hold the same experts."""
        return self._folded // self.parallel.ep

    @property
    def peers(self) -> list["MeshPosition"]:
        """Ranks that divide experts with this one, itself included."""
        first, parallel = self._folded - self.ep, self.parallel
        peers = []
        for place in range(first, first + parallel.ep):
            above, tp = divmod(place, parallel.tp) if self._folds_tp else (place, self.tp)
            shard, cp = divmod(above, parallel.cp)
            peers.append(replace(self, shard=shard, cp=cp, tp=tp))
        return peers

    @property
    def _folded(self) -> int:
        place = self.shard * self.parallel.cp + self.cp
        return place * self.parallel.tp + self.tp if self._folds_tp else place

    @property
    def _folds_tp(self) -> bool:
        return self.parallel.expert_tp == "folded"
