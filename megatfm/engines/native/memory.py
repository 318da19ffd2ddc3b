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

from megatfm.checkpoint import Box
from megatfm.engines.interface import MOMENTS, MemoryNeeds, OptimizerGroup
from megatfm.engines.native.data_parallel import Sharing
from megatfm.engines.pipelined import inputs_held
from megatfm.engines.precision import Precision
from megatfm.parallel.blocks import blocks
from megatfm.parallel.mesh import PIPELINE, SHARD, Mesh
from megatfm.parallel.pipeline_cut import Pipeline
from megatfm.parallel.pipeline_schedule import SPLITS_BACKWARD


def moment_share(groups: Iterable[OptimizerGroup], weights: Mapping[str, Box]) -> float:
    """Bytes of a moment in its group's dtype, of those of its weight, in the mean over this rank's trained weights."""
    bytes_of = {
        name: weights[name].tensor.nbytes for group in groups for name in group.names if name in weights
    }
    short = sum(
        bytes_of[name] * (1 - group.moments.itemsize / weights[name].tensor.itemsize)
        for group in groups
        for name in group.names
        if group.moments and name in weights
    )
    return 1 - short / max(sum(bytes_of.values()), 1)


def memory_needed(
    model: nn.Module,
    weights: Iterable[Box],
    precision: Precision,
    sharing: Sharing,
    mesh: Mesh,
    pipeline: Pipeline | None,
    *,
    moment_share: float,
    microbatches: int,
    block_input: int,
) -> MemoryNeeds:
    """From what the engine has built. weights: this rank's blocks; moment_share: see above; block_input: bytes of a
    micro-batch's."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    whole, in_blocks = sum(p.numel() for p in model.parameters()), sum(sizes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    local = sum(box.tensor.nbytes for box in weights) * trained // max(whole, 1)
    adds_up = pipeline is not None or (microbatches > 1 and sharing.accumulate == "whole")
    splits = pipeline is not None and pipeline.schedule in SPLITS_BACKWARD
    gathered = 0
    if sharing.zero == 2 or (sharing.zero == 3 and splits):
        gathered = whole * precision.computed.itemsize
    elif sharing.zero == 3:
        ahead = sharing.ahead(mesh.device_mesh.device_type)
        together = sum(sorted(sizes)[-1 - ahead :])  # the block that runs, and those that are asked for
        gathered = (whole - in_blocks + together) * precision.computed.itemsize
    if mesh.size(SHARD) == 1 and not precision.is_mixed:
        gathered = 0  # the weights themselves
    return MemoryNeeds(
        gradients=trained * precision.stored.itemsize if sharing.zero < 2 or adds_up else local,
        moments=int(MOMENTS * local * moment_share),
        gathered=gathered,
        inputs=inputs_held(pipeline, mesh.rank(PIPELINE), microbatches, len(sizes)) * block_input,
    )
