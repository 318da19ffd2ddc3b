"""ZeRO: how weights, gradients and optimizer state are sharded over data ranks (Rajbhandari et al. 2020), and memory.

| Stage | Cut over dp_shard | File |
|---|---|---|
| 0 | nothing | replicated.py |
| 1 | optimizer state and the weights that it moves | replicated.py |
| 2 | + gradients | fully_sharded.py |
| 3 | + the weights that the model computes with | fully_sharded.py |

A single data rank takes stage 0 whatever was asked for. dp_replicate always replicates what
dp_shard leaves. A cut is along dim 0, in equal parts of ⌈rows / ranks⌉ but for the last ones; stages 2 and 3 cut
experts along dim 1 where their number can't be divided. A checkpoint of any stage opens in any other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from megatfm.checkpoint import ShardedTensor
from megatfm.config import ParallelConfig
from megatfm.engines.interface import MOMENTS, MemoryNeeds, OptimizerGroup, Precision
from megatfm.engines.passes import GradientSync
from megatfm.engines.pipeline import max_block_inputs
from megatfm.parallel.layout import Chunk, transformer_blocks
from megatfm.parallel.mesh import PIPELINE, SHARD, Mesh
from megatfm.parallel.pipeline_schedule import SPLITS_BACKWARD
from megatfm.parallel.pipeline_stages import Pipeline


@dataclass(frozen=True)
class ZeroOptions:
    """Settings of ZeRO.

    zero: the stage. accumulate: gradients of a step's micro-batches, "unsharded": each rank adds up whole ones, reduced
    once; "sharded": they are reduced after each micro-batch, so that only shards are kept (stages 2 and 3).
    reduce_dtype: the dtype in which gradients are sent and summed over ranks; None: the stored one. prefetch: number of
    blocks whose weights stages 2 and 3 prefetch; 0: as FSDP2 does by itself; None: see `prefetch_depth`.
    use_group_allocator: the process group allocates their buffers.
    """

    zero: Literal[0, 1, 2, 3] = 3
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    reduce_dtype: torch.dtype | None = None
    prefetch: int | None = None
    use_group_allocator: bool = False

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """Settings of a config."""
        reduce_dtype = torch.bfloat16 if parallel.reduce_dtype == "bf16" else None
        return cls(
            parallel.zero,
            parallel.grad_accumulation,
            reduce_dtype,
            parallel.fsdp_prefetch,
            parallel.comm_buffers == "process_group",
        )

    def prefetch_depth(self, device_type: str) -> int:
        """`prefetch`, or its default: 0 on CPUs, where gathering competes with compute for cores, and 1 on GPUs."""
        return int(device_type != "cpu") if self.prefetch is None else self.prefetch


class DataParallel(GradientSync, Protocol):
    """One way to shard. Every method is called by all data ranks together, in the same order."""

    local: dict[str, Tensor]
    """The blocks of the weights that the optimizer moves here, in the stored precision."""
    boxes: dict[str, Chunk]
    """Their offsets in the global tensors."""
    sharded: bool
    """Whether the blocks on the ranks of a parameter's shard axis are different ones, or copies."""

    def reduce(self) -> None:
        """After the last backward pass: sum gradients over the data axes, as far as it has not been done in it."""

    def gradients(self) -> dict[str, Tensor]:
        """The blocks of the gradients that go with `local`; after `reduce`, complete over the data axes."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def weights_changed(self, frozen: bool = False) -> None:
        """Have the weights that the model computes with follow `local`; with `frozen` also those that no step moves."""

    def wait_for_weights(self) -> None:
        """Wait for all weights that the model's own modules would wait for when they run."""


def state_size_ratio(groups: Iterable[OptimizerGroup], weights: Mapping[str, ShardedTensor]) -> float:
    """Size of a moment in its group's dtype relative to its weight, in the mean over this rank's trained weights."""
    bytes_of = {
        name: weights[name].tensor.nbytes for group in groups for name in group.names if name in weights
    }
    short = sum(
        bytes_of[name] * (1 - group.state_dtype.itemsize / weights[name].tensor.itemsize)
        for group in groups
        for name in group.names
        if group.state_dtype and name in weights
    )
    return 1 - short / max(sum(bytes_of.values()), 1)


def memory_needed(
    model: nn.Module,
    weights: Iterable[ShardedTensor],
    precision: Precision,
    sharing: ZeroOptions,
    mesh: Mesh,
    pipeline: Pipeline | None,
    *,
    state_size: float,
    microbatches: int,
    block_input: int,
) -> MemoryNeeds:
    """Memory that a step takes of a rank at least, besides the weights that it holds already.

    | ZeRO | Gradients | Moments | Gathered weights |
    |---|---|---|---|
    | 0 | all | all | – |
    | 1 | all | shard | – |
    | 2 | shard; all where micro-batches add up | shard | all |
    | 3 | likewise | shard | a block, those prefetched, and what is in no block; all in pipelines that split backward |

    "All" is what this rank's stages hold of the model, cut by tensor parallelism. Of activations only what every
    recompute mode keeps is counted: the input of each block, for as many micro-batches as a rank holds at a time.

    weights: this rank's blocks. state_size: see `state_size_ratio`. block_input: bytes of a micro-batch between two
    blocks.
    """
    sizes = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(model)]
    total, in_blocks = sum(p.numel() for p in model.parameters()), sum(sizes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    local = sum(box.tensor.nbytes for box in weights) * trained // max(total, 1)
    adds_up = pipeline is not None or (microbatches > 1 and sharing.accumulate == "unsharded")
    splits = pipeline is not None and pipeline.schedule in SPLITS_BACKWARD
    gathered = 0
    if sharing.zero == 2 or (sharing.zero == 3 and splits):
        gathered = total * precision.compute_dtype.itemsize
    elif sharing.zero == 3:
        ahead = sharing.prefetch_depth(mesh.device_mesh.device_type)
        together = sum(sorted(sizes)[-1 - ahead :])  # the block that runs, and those prefetched
        gathered = (total - in_blocks + together) * precision.compute_dtype.itemsize
    if mesh.size(SHARD) == 1 and not precision.is_mixed:
        gathered = 0  # the weights themselves
    return MemoryNeeds(
        gradients=trained * precision.param_dtype.itemsize if sharing.zero < 2 or adds_up else local,
        optimizer_state=int(MOMENTS * local * state_size),
        gathered=gathered,
        block_inputs=max_block_inputs(pipeline, mesh.rank(PIPELINE), microbatches, len(sizes)) * block_input,
    )
