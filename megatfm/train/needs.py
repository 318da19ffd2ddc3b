"""What a step will at least take of this rank's memory, besides the weights that it holds already.

| ZeRO | Gradients | Moments | Gathered weights |
|---|---|---|---|
| 0 | whole | whole | – |
| 1 | whole | shard | – |
| 2 | shard; whole where micro-batches add up | shard | whole |
| 3 | likewise | shard | a block, and what lies in none; whole in pipelines that split their backward passes |

"Whole" is what this rank's stages hold of the model, cut by tensor parallelism. Of activations only what every way to
recompute keeps is counted: the input of each block, for as many micro-batches as a rank holds at a time.
"""

from dataclasses import dataclass

from megatfm.config import Config
from megatfm.engines import NativeEngine
from megatfm.parallel.blocks import blocks
from megatfm.parallel.pipeline_schedule import orders

MOMENTS = 2
"""Optimizer state per weight, as Adam has it: near enough to see that something will not fit."""


@dataclass(frozen=True)
class Needs:
    """Bytes of this rank."""

    gradients: int
    moments: int
    gathered: int
    inputs: int

    @property
    def total(self) -> int:
        return self.gradients + self.moments + self.gathered + self.inputs


def needs(config: Config, engine: NativeEngine) -> Needs:
    """From the layout and the sizes of what the engine has built."""
    parallel, mesh = config.parallel, engine.mesh
    stored, computed = engine.precision.stored.itemsize, engine.precision.computed.itemsize
    microbatches = config.train.global_batch // (config.train.micro_batch * mesh.data_ranks)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks(engine.model)]
    whole, in_blocks = sum(p.numel() for p in engine.model.parameters()), sum(sizes)
    local = sum(block.nbytes for block in engine.local.values())
    adds_up = mesh.size("pp") > 1 or (microbatches > 1 and parallel.accumulate == "whole")
    gathered = 0
    if parallel.zero == 2 or (parallel.zero == 3 and mesh.size("pp") > 1 and parallel.splits_backward):
        gathered = whole * computed
    elif parallel.zero == 3:
        gathered = (whole - in_blocks + max(sizes, default=0)) * computed
    if mesh.size("dp_shard") == 1 and not engine.precision.is_mixed:
        gathered = 0  # the weights themselves
    return Needs(
        gradients=whole * stored if parallel.zero < 2 or adds_up else local,
        moments=MOMENTS * local,
        gathered=gathered,
        inputs=held(config, mesh.rank("pp"), microbatches, len(sizes)) * block_input(config, computed),
    )


def held(config: Config, rank: int, microbatches: int, n_blocks: int) -> int:
    """Most inputs of blocks that a pipeline rank keeps at a time: of each micro-batch between its two passes."""
    parallel = config.parallel
    if parallel.pp == 1:
        return n_blocks
    order = orders(parallel.schedule, parallel.pp, parallel.stages_per_rank, microbatches)[rank]
    now = most = 0
    for action in order:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, now)
    return most * n_blocks // len({action.stage for action in order})


def block_input(config: Config, itemsize: int) -> int:
    """Bytes of a micro-batch in the residual stream of one rank."""
    data, parallel = config.data, config.parallel
    tokens = min(data.sequence_length, data.target_length or data.sequence_length)
    rows = config.train.micro_batch * tokens // (parallel.tp if parallel.sequence_parallel else 1)
    return rows * config.model.d_model * itemsize
