"""What a step of the native engine will at least take of a rank's memory, besides the weights that it holds already.

| ZeRO | Gradients | Moments | Gathered weights |
|---|---|---|---|
| 0 | whole | whole | – |
| 1 | whole | shard | – |
| 2 | shard; whole where micro-batches add up | shard | whole |
| 3 | likewise | shard | a block and those ahead, and what lies in none; whole in pipelines that split backward passes |

"Whole" is what this rank's stages hold of the model, cut by tensor parallelism. Of activations only what every way to
recompute keeps is counted: the input of each block, for as many micro-batches as a rank holds at a time.
"""

from collections.abc import Iterable, Mapping

from torch import nn

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.interface import MOMENTS, MemoryNeeds, OptimizerGroup
from megatfm.engines.native.data_parallel import ZeroOptions
from megatfm.engines.pipelined import max_block_inputs
from megatfm.engines.precision import Precision
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.mesh import PIPELINE, SHARD, Mesh
from megatfm.parallel.pipeline_cut import Pipeline
from megatfm.parallel.pipeline_schedule import SPLITS_BACKWARD


def state_size_ratio(groups: Iterable[OptimizerGroup], weights: Mapping[str, ShardedTensor]) -> float:
    """Bytes of a moment in its group's dtype, of those of its weight, in the mean over this rank's trained weights."""
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
    moment_share: float,
    microbatches: int,
    block_input: int,
) -> MemoryNeeds:
    """From what the engine has built. weights: this rank's blocks; moment_share: see above; block_input_bytes: bytes
    of a micro-batch's."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(model)]
    whole, in_blocks = sum(p.numel() for p in model.parameters()), sum(sizes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    local = sum(box.tensor.nbytes for box in weights) * trained // max(whole, 1)
    adds_up = pipeline is not None or (microbatches > 1 and sharing.accumulate == "unsharded")
    splits = pipeline is not None and pipeline.schedule in SPLITS_BACKWARD
    gathered = 0
    if sharing.zero == 2 or (sharing.zero == 3 and splits):
        gathered = whole * precision.compute_dtype.itemsize
    elif sharing.zero == 3:
        ahead = sharing.prefetch_depth(mesh.device_mesh.device_type)
        together = sum(sorted(sizes)[-1 - ahead :])  # the block that runs, and those that are asked for
        gathered = (whole - in_blocks + together) * precision.compute_dtype.itemsize
    if mesh.size(SHARD) == 1 and not precision.is_mixed:
        gathered = 0  # the weights themselves
    return MemoryNeeds(
        gradients=trained * precision.param_dtype.itemsize if sharing.zero < 2 or adds_up else local,
        optimizer_state=int(MOMENTS * local * moment_share),
        gathered=gathered,
        block_inputs=max_block_inputs(pipeline, mesh.rank(PIPELINE), microbatches, len(sizes)) * block_input,
    )
