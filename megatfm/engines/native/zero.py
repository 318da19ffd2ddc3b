"""ZeRO (Rajbhandari et al. 2020): sharding of weights, gradients and optimizer state over data ranks.

| Stage | Sharded over dp_shard × cp | File |
|---|---|---|
| 0 | nothing | replicated.py |
| 1 | optimizer state and the weights that it updates | replicated.py |
| 2 | + gradients | fully_sharded.py |
| 3 | + the weights that the model computes with | fully_sharded.py |

Under expert parallelism, experts are sharded over edp instead (see `parallel.mesh`). dp_replicate always replicates the
shards. A single rank uses stage 0, whatever is configured. Tensors are sharded along dim 0: ⌈rows / ranks⌉ rows on each
rank, fewer on the last ones. Stages 2 and 3 shard experts along dim 1 if their number is not divisible. A checkpoint of
any stage can be loaded with any other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from megatfm.checkpoint import ShardedTensor
from megatfm.config import ParallelConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.passes import GradientSync


@dataclass(frozen=True)
class ZeroOptions:
    """Settings of ZeRO.

    zero: the stage. grad_accumulation: gradients of a step's micro-batches; "unsharded": each rank accumulates full
    gradients, reduced once; "sharded": they are reduced after each micro-batch, so that only shards are kept
    (stages 2 and 3).
    reduce_dtype: dtype in which gradients are sent and summed over ranks; None: the stored one. prefetch: number of
    blocks whose weights stages 2 and 3 prefetch; 0: FSDP2's own prefetching; None: see `get_prefetch_depth`.
    use_group_allocator: the process group allocates communication buffers (stages 2 and 3).
    """

    zero: Literal[0, 1, 2, 3] = 3
    grad_accumulation: Literal["unsharded", "sharded"] = "unsharded"
    reduce_dtype: torch.dtype | None = None
    prefetch: int | None = None
    use_group_allocator: bool = False

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> Self:
        """Return the settings of a config."""
        reduce_dtype = torch.bfloat16 if parallel.reduce_dtype == "bf16" else None
        return cls(
            parallel.zero,
            parallel.grad_accumulation,
            reduce_dtype,
            parallel.fsdp_prefetch,
            parallel.comm_buffers == "process_group",
        )

    def get_prefetch_depth(self, device_type: str) -> int:
        """Return `prefetch`, or its default: 1 on GPUs, 0 on CPUs, where gathering competes with compute for cores."""
        return int(device_type != "cpu") if self.prefetch is None else self.prefetch


class DataParallel(GradientSync, Protocol):
    """Sharding of a model over data ranks. Every method is a collective of all data ranks."""

    local: dict[str, Tensor]
    """Blocks of the weights that this rank's optimizer updates, in the stored precision."""
    zero_dims: dict[str, int]
    """Dims that ZeRO shards over `DataAxes.shard`, by weight; other weights are whole on each rank."""
    sharded: bool
    """Whether ranks along `DataAxes.shard` hold different blocks of a parameter; otherwise copies."""

    def reduce(self) -> None:
        """Finish summing gradients over the data axes, after the last backward pass."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the blocks in `local`; after `reduce`, complete over the data axes."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def sync_weights(self, frozen: bool = False) -> None:
        """Update the weights that the model computes with from `local`. frozen: frozen weights too."""

    def wait_for_weights(self) -> None:
        """Wait for weights in transfer, for which modules otherwise wait when they run."""


def compute_state_size_ratio(groups: Iterable[OptimizerGroup], weights: Mapping[str, ShardedTensor]) -> float:
    """Return the size of optimizer state relative to its weight, on average over this rank's trained weights."""
    bytes_of = {name: weights[name].tensor.nbytes for group in groups for name in group.names if name in weights}
    saved_bytes = sum(
        bytes_of[name] * (1 - group.state_dtype.itemsize / weights[name].tensor.itemsize)
        for group in groups
        for name in group.names
        if group.state_dtype and name in weights
    )
    return 1 - saved_bytes / max(sum(bytes_of.values()), 1)
