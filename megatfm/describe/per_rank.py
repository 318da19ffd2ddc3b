"""State on one rank of a layout, counted with the layout itself on torch's fake process group, in this process."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatfm.config import Config, ParallelConfig
from megatfm.describe.description import optimizer_state_bytes
from megatfm.parallel.layout import TensorLayout
from megatfm.parallel.mesh import Mesh, build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.train.build import build_model, plan_pipeline_split


@dataclass(frozen=True)
class RankState:
    """Bytes that the fullest of `ranks` holds with a step's gradients. parameters: before ZeRO shards them.

    weight_bytes: what the optimizer moves and, up to ZeRO 2 in mixed precision, the copy that the model computes with;
    ZeRO 2 gathers it in a step's first pass and keeps it until the last. What ZeRO 3 gathers for a pass, and
    activations, come on top.
    """

    ranks: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all three."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def rank_state(config: Config) -> RankState | None:
    """Count the state on the fullest rank of `parallel`, native engine; None for one process and other engines.

    With dp_shard = -1, which takes all processes that there are, the fewest possible are assumed. Raises UsageError
    where the layout does not fit the model.
    """
    min_ranks = max(config.parallel.dp_shard, _least_shard(config.parallel))
    parallel = config.parallel.model_copy(update={"dp_shard": min_ranks})
    ranks = math.prod((parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp))
    if ranks == 1 or parallel.engine != "native" or dist.is_initialized():
        return None
    with torch.device("meta"):
        model = build_model(config)
    weight_bytes = 8 if config.train.precision == "fp64" else 4
    optimizer = optimizer_state_bytes(config, model, weight_bytes)
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    holders: Mapping[str, tuple[int, ...]] = {}
    if parallel.pp > 1:
        holders = plan_pipeline_split(config, model).parameter_ranks
    with _fake_mesh(parallel, ranks) as mesh:
        layout = parallelize(
            model, mesh, sequence_parallel=parallel.sequence_parallel, context=parallel.cp_method
        )
        holders = holders or dict.fromkeys(layout, (0,))
        zero = parallel.zero if mesh.data_ranks > 1 else 0
        local = {name: math.prod(tensor.region[1]) for name, tensor in layout.items()}
        shard = {name: _shard_size(tensor, mesh) for name, tensor in layout.items()} if zero else local
        gradient = local if _has_whole_gradients(config, zero, mesh.data_ranks) else shard
        computed = local  # under ZeRO 2, gathered from shards of equal size
        if zero == 2:
            computed = {name: shard[name] * mesh.size(layout[name].data_axes.shard) for name in layout}
    is_mixed = config.train.precision not in ("fp32", "fp64")
    stored = local if zero == 1 and not is_mixed else shard
    states = []
    for pipeline_rank in range(parallel.pp):
        names = [name for name in layout if pipeline_rank in holders[name]]
        parameters = sum(local[name] for name in names)
        copy_bytes = 2 * sum(computed[name] for name in names) if zero < 3 and is_mixed else 0
        state = RankState(
            ranks,
            parameters,
            sum(stored[name] for name in names) * weight_bytes + copy_bytes,
            sum(gradient[name] for name in names if is_trained[name]) * weight_bytes,
            sum(optimizer.get(name, 0) * shard[name] // math.prod(layout[name].shape) for name in names),
        )
        states.append(state)
    return max(states, key=lambda state: state.total_bytes)


def _least_shard(parallel: ParallelConfig) -> int:
    """Return the fewest ranks of dp_shard over which `ep` divides the experts."""
    other_ranks = parallel.cp * (parallel.tp if parallel.expert_tp == "folded" else 1)
    return parallel.ep // math.gcd(parallel.ep, other_ranks)


def _shard_size(tensor: TensorLayout, mesh: Mesh) -> int:
    """Return how many elements of a tensor ZeRO leaves the first rank, which has as many as any."""
    _, sizes = tensor.region
    if not sizes:
        return 1
    rows = sizes[tensor.fsdp_dim]
    return math.prod(sizes) // rows * -(-rows // mesh.size(tensor.data_axes.shard))


def _has_whole_gradients(config: Config, zero: int, data_ranks: int) -> bool:
    """Return whether ZeRO leaves gradients whole, as where those of several micro-batches add up."""
    parallel, train = config.parallel, config.train
    has_accumulation = train.global_batch > train.micro_batch * data_ranks
    return zero < 2 or parallel.pp > 1 or (has_accumulation and parallel.grad_accumulation == "unsharded")


@contextmanager
def _fake_mesh(parallel: ParallelConfig, ranks: int) -> Iterator[Mesh]:
    """Yield the mesh of a layout as its first rank sees it, of processes that don't exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield build_mesh(parallel, ranks, "cpu")
    finally:
        dist.destroy_process_group()
