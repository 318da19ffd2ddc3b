"""State on one rank of a layout: the model is parallelized in this process on torch's fake process group."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatfm.config import Config, ParallelConfig
from megatfm.describe.description import count_optimizer_state
from megatfm.errors import UsageError
from megatfm.parallel.layout import TensorLayout
from megatfm.parallel.mesh import Mesh, build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.train.build import build_model, plan_pipeline_split


@dataclass(frozen=True)
class RankState:
    """Bytes on the fullest of `ranks` ranks while it holds gradients. parameters: before ZeRO shards them.

    weight_bytes: the optimizer's weights and, up to ZeRO 2 in mixed precision, the low-precision copy that the model
    computes with. ZeRO 2 keeps that copy gathered from a step's first pass to its last. Not counted: activations, and
    weights that ZeRO 3 gathers for a pass.
    """

    ranks: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def count_rank_state(config: Config) -> RankState | None:
    """Count the state on the fullest rank of the config's layout; None for one process or another engine than native.

    With dp_shard = -1 (all processes of the job), counts for the smallest dp_shard possible. Raises UsageError where
    the layout does not fit the model.
    """
    dp_shard = max(config.parallel.dp_shard, _compute_min_dp_shard(config.parallel))
    parallel = config.parallel.model_copy(update={"dp_shard": dp_shard})
    ranks = math.prod((parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp))
    if ranks == 1 or parallel.engine != "native" or dist.is_initialized():
        return None
    with torch.device("meta"):
        model = build_model(config)
    weight_bytes = 8 if config.train.precision == "fp64" else 4
    optimizer = count_optimizer_state(config, model, weight_bytes)
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    holders = plan_pipeline_split(config, model).parameter_ranks if parallel.pp > 1 else {}
    with fake_ranks(ranks):
        mesh = build_mesh(parallel, ranks, "cpu")
        layout = parallelize(model, mesh, sequence_parallel=parallel.sequence_parallel, cp_method=parallel.cp_method)
        holders = holders or dict.fromkeys(layout, (0,))
        zero = parallel.effective_zero
        local_numel = {name: math.prod(tensor.region[1]) for name, tensor in layout.items()}
        shard_numel = {n: _count_shard_elements(tensor, mesh) for n, tensor in layout.items()} if zero else local_numel
        gradient_numel = local_numel if _has_whole_gradients(config, zero, mesh.data_ranks) else shard_numel
        computed_numel = local_numel  # under ZeRO 2, gathered from shards of equal size
        if zero == 2:
            computed_numel = {name: shard_numel[name] * mesh.count_shards(layout[name].data_axes) for name in layout}
    is_mixed = config.train.precision not in ("fp32", "fp64")
    stored_numel = local_numel if zero == 1 and not is_mixed else shard_numel
    states = []
    for pipeline_rank in range(parallel.pp):
        names = [name for name in layout if pipeline_rank in holders[name]]
        parameters = sum(local_numel[name] for name in names)
        copy_bytes = 2 * sum(computed_numel[name] for name in names) if zero < 3 and is_mixed else 0
        optimizer_bytes = (
            optimizer.get(name, 0) * shard_numel[name] // math.prod(layout[name].shape) for name in names
        )
        states.append(
            RankState(
                ranks=ranks,
                parameters=parameters,
                weight_bytes=sum(stored_numel[name] for name in names) * weight_bytes + copy_bytes,
                gradient_bytes=sum(gradient_numel[name] for name in names if is_trained[name]) * weight_bytes,
                optimizer_bytes=sum(optimizer_bytes),
            )
        )
    return max(states, key=lambda state: state.total_bytes)


def _compute_min_dp_shard(parallel: ParallelConfig) -> int:
    """Return the fewest ranks of dp_shard over which `ep` divides the experts."""
    return parallel.ep // math.gcd(parallel.ep, parallel.expert_mesh_size // parallel.dp_shard)


def _count_shard_elements(tensor: TensorLayout, mesh: Mesh) -> int:
    """Return the elements of a tensor's ZeRO shard on the first rank, whose shard is the largest."""
    _, sizes = tensor.region
    if not sizes:
        return 1
    rows = sizes[tensor.fsdp_dim]
    return math.prod(sizes) // rows * -(-rows // mesh.count_shards(tensor.data_axes))


def _has_whole_gradients(config: Config, zero: int, data_ranks: int) -> bool:
    """Return whether gradients stay unsharded, as where several micro-batches accumulate."""
    parallel, train = config.parallel, config.train
    has_accumulation = train.global_batch > train.micro_batch * data_ranks
    return zero < 2 or parallel.pp > 1 or (has_accumulation and parallel.grad_accumulation == "unsharded")


@contextmanager
def fake_ranks(size: int, rank: int = 0) -> Iterator[None]:
    """Be one of `size` ranks without the others. Raises UsageError in a process that has a process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise UsageError("an estimate needs a process without a process group: run `megatfm estimate` by itself")
    excepthook = sys.excepthook  # torch's begins each line of a traceback with a rank
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
