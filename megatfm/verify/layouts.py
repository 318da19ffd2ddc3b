"""Layouts: their axes, the order of ranks along them, and the usual ones under which presets are verified.

Like the `expected_*` files, imports neither `megatfm.parallel` nor `megatfm.layers`, which are checked against it; and
nothing heavy, so that the command line is quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Literal

from megatfm.config import ParallelConfig

Documents = Literal["mixed", "short", "long", "one", "sparse"]
"""Documents in a row. "short": many; "long": two, the second cut off; "one": one as long as the row; "sparse": a short
one, then padding; "mixed": rows of these kinds in turn."""

SINGLE_RANK = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "ep": 1}

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "dp2": {"dp_shard": 2},
    "dp2-zero0": {"dp_shard": 2, "zero": 0},
    "dp2-zero1": {"dp_shard": 2, "zero": 1},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "cp3-ring": {"cp": 3, "cp_method": "ring"},
    "cp2-heads": {"cp": 2, "cp_method": "ulysses"},
    "pp2": {"pp": 2},
    "ep2": {"dp_shard": 2, "ep": 2},
    "tp2-cp2": {"tp": 2, "cp": 2},
    "pp2-dp2": {"pp": 2, "dp_shard": 2, "pp_schedule": "interleaved"},
}
"""Name → keys of [parallel]; omitted axes have one rank."""

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"
EXPERT_SHARD, EXPERT = "edp", "ep"
ORDER = (PIPELINE, REPLICATE, SHARD, EXPERT_SHARD, EXPERT, CONTEXT, TENSOR)
"""Axes from slowest to fastest, as in the names of groups over several axes."""


def get_axis_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Return axis → ranks."""
    return {
        PIPELINE: parallel.pp,
        REPLICATE: parallel.dp_replicate,
        SHARD: parallel.dp_shard,
        EXPERT_SHARD: parallel.expert_mesh_size // parallel.ep,
        EXPERT: parallel.ep,
        CONTEXT: parallel.cp,
        TENSOR: parallel.tp,
    }


def count_ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks of a layout."""
    return parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp


def list_group_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Return axis, or axes joined by ` × ` → ranks."""
    single = get_axis_sizes(parallel)
    axis_groups = [axes for count in (2, 3) for axes in combinations(ORDER, count)]
    return single | {" × ".join(axes): prod(single[axis] for axis in axes) for axes in axis_groups}


def name_group(sizes_by_axis: Mapping[str, int], *axes: str) -> str:
    """Return the name of the group over several axes: those with more than one rank."""
    return " × ".join(axis for axis in axes if sizes_by_axis[axis] > 1) or axes[0]


@dataclass(frozen=True)
class MeshPosition:
    """Coordinates of a rank on the mesh."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    parallel: ParallelConfig

    @classmethod
    def from_rank(cls, rank: int, parallel: ParallelConfig) -> "MeshPosition":
        """Compute the coordinates of a rank: tp varies fastest, then cp, dp_shard, dp_replicate and pp."""
        quotient, tp = divmod(rank, parallel.tp)
        quotient, cp = divmod(quotient, parallel.cp)
        quotient, shard = divmod(quotient, parallel.dp_shard)
        pp, replicate = divmod(quotient, parallel.dp_replicate)
        return cls(pp, replicate, shard, cp, tp, parallel)

    @property
    def data_rank(self) -> int:
        """Index of the rank's share of the global batch; dp_replicate is the slower axis."""
        return self.replicate * self.parallel.dp_shard + self.shard

    @property
    def ep(self) -> int:
        """Index among the ranks that divide experts."""
        return self._folded_index % self.parallel.ep

    @property
    def edp(self) -> int:
        """Index among the ranks that hold the same experts."""
        return self._folded_index // self.parallel.ep

    @property
    def expert_peers(self) -> list["MeshPosition"]:
        """Positions of the ranks that divide experts with this one, itself included."""
        first, parallel = self._folded_index - self.ep, self.parallel
        peers = []
        for index in range(first, first + parallel.ep):
            quotient, tp = divmod(index, parallel.tp) if self._folds_tp else (index, self.tp)
            shard, cp = divmod(quotient, parallel.cp)
            peers.append(replace(self, shard=shard, cp=cp, tp=tp))
        return peers

    @property
    def _folded_index(self) -> int:
        """Index on the joint mesh of data, context and (folded) tensor parallelism, over which experts are divided."""
        index = self.shard * self.parallel.cp + self.cp
        return index * self.parallel.tp + self.tp if self._folds_tp else index

    @property
    def _folds_tp(self) -> bool:
        return self.parallel.expert_tp == "folded"
