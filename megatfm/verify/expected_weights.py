"""Expected traffic of weights, gradients and metrics over a step, from the shards that a rank holds.

ZeRO (Rajbhandari et al. 2020), weights tied across pipeline ranks, partial gradients, optimizers that need whole
tensors. See `expected.py`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import nn

from megatfm.config import Config, ParallelConfig
from megatfm.engines.interface import PRECISIONS, CountingModule, OptimizerGroup
from megatfm.optim.parameters import build_optimizer_groups
from megatfm.verify.expected_pipeline import ExpectedPipeline, ExpectedStage
from megatfm.verify.layouts import (
    CONTEXT,
    EXPERT,
    EXPERT_SHARD,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshPosition,
    name_group,
)
from megatfm.verify.module_calls import Call
from megatfm.verify.module_shardings import ModuleSharding, list_block_paths
from megatfm.verify.shrink import objective_for
from megatfm.verify.traffic import ExpectedTraffic

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankParameters:
    """Parameters of the plain model on one rank. shardings: module path → tensor-parallel sharding.

    tensors, block_paths, optimizer_groups, counting_modules: of the whole model, the same on all ranks.
    """

    model: nn.Module
    shardings: Mapping[str, ModuleSharding]
    pipeline: ExpectedPipeline | None
    position: MeshPosition
    parallel: ParallelConfig
    tensors: Mapping[str, nn.Parameter]
    block_paths: Sequence[str]
    optimizer_groups: Sequence[OptimizerGroup]
    counting_modules: Mapping[str, CountingModule]

    @classmethod
    def from_model(
        cls,
        config: Config,
        model: nn.Module,
        shardings: Mapping[str, ModuleSharding],
        pipeline: ExpectedPipeline | None,
    ) -> "RankParameters":
        """Return the parameters of rank 0; those of another rank are `replace(…, position=…)`."""
        return cls(
            model,
            shardings,
            pipeline,
            MeshPosition.from_rank(0, config.parallel),
            config.parallel,
            dict(model.named_parameters()),
            list_block_paths(model),
            build_optimizer_groups(config.optimizer, model),
            {path: module for path, module in model.named_modules() if isinstance(module, CountingModule)},
        )

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name → shape before ZeRO, of the parameters on this pipeline rank."""
        return {
            name: self.compute_shape(name, self.position)
            for name in self.tensors
            if self.pipeline is None or self.position.pp in self.pipeline.holders[name]
        }

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters on this rank that are trained."""
        return [name for name in self.shapes if self.tensors[name].requires_grad]

    def compute_shape(self, name: str, position: MeshPosition) -> Shape:
        """Compute the shape of a parameter on a rank before ZeRO."""
        shape = list(self.tensors[name].shape)
        if self.is_expert(name):
            shape[0] //= self.parallel.ep
        dim, n_shards = self._find_shard_dim(name), self.parallel.tp
        if dim is not None and n_shards > 1:
            shard_size = -(-shape[dim] // n_shards)
            shape[dim] = max(0, min(shard_size, shape[dim] - shard_size * position.tp))
        return tuple(shape)

    def is_expert(self, name: str) -> bool:
        """Return whether expert parallelism shards the parameter."""
        return self.parallel.ep > 1 and self._get_sharding(name).are_experts

    def list_shard_axes(self, name: str) -> tuple[str, ...]:
        """Return the axes over which ZeRO shards the parameter."""
        return (EXPERT_SHARD,) if self.is_expert(name) else (SHARD, CONTEXT)

    def count_shards(self, name: str) -> int:
        """Return the number of ranks over which ZeRO shards the parameter."""
        if self.is_expert(name):
            return self.parallel.expert_mesh_size // self.parallel.ep
        return self.parallel.dp_shard * self.parallel.cp

    def compute_shard_index(self, name: str, position: MeshPosition) -> int:
        """Return a rank's index among those over which ZeRO shards the parameter."""
        return position.edp if self.is_expert(name) else position.shard * self.parallel.cp + position.cp

    @property
    def zero(self) -> int:
        """ZeRO stage; 0 for a single data and context rank."""
        parallel = self.parallel
        return parallel.zero if parallel.dp_shard * parallel.dp_replicate * parallel.cp > 1 else 0

    def identify_block(self, name: str, position: MeshPosition) -> tuple[int, ...]:
        """Return an id of the block that a rank holds of a parameter: equal for ranks with the same block."""
        return (
            position.ep if self.is_expert(name) else 0,
            position.tp if self.is_tp_sharded(name) else 0,
            self.compute_shard_index(name, position) if self.zero else 0,
        )

    def is_tp_sharded(self, name: str) -> bool:
        """Return whether tensor parallelism shards the parameter rather than replicating it."""
        return self.parallel.tp > 1 and self._find_shard_dim(name) is not None

    def is_partial(self, name: str) -> bool:
        """Return whether each tensor-parallel rank has only a partial gradient."""
        return self.has_partial_gradients(self._get_sharding(name)) and not self.is_tp_sharded(name)

    def has_partial_gradients(self, sharding: ModuleSharding) -> bool:
        """Return whether replicated tensors with this sharding have partial gradients."""
        if sharding.gradient == "partial_with_sp":
            return self.parallel.tp > 1 and self.parallel.sequence_parallel
        return self.parallel.tp > 1 and sharding.gradient == "partial"

    def count_local_elements(self, name: str, position: MeshPosition | None = None) -> int:
        """Return the elements of a parameter on a rank (default: this one) after ZeRO."""
        position = position or self.position
        shape, n_shards = self.compute_shape(name, position), self.count_shards(name) if self.zero else 1
        size = shape[self._find_zero_dim(name)]
        shard_size = -(-size // n_shards)
        shard_index = self.compute_shard_index(name, position) if n_shards > 1 else 0
        return max(0, min(shard_size, size - shard_size * shard_index)) * (prod(shape) // size)

    def count_padded_elements(self, name: str) -> int:
        """Return the elements of a parameter when ZeRO's shards are padded to equal sizes."""
        shape, ranks = self.shapes[name], self.count_shards(name)
        size = shape[self._find_zero_dim(name)]
        return ranks * -(-size // ranks) * (prod(shape) // size)

    def _find_zero_dim(self, name: str) -> int:
        """Return the dim that ZeRO shards: 0, or 1 of experts under ZeRO 2 and 3 if their number isn't divisible."""
        if not self._get_sharding(name).are_experts or self.zero < 2:
            return 0
        (experts, *inner), ranks = self.compute_shape(name, self.position), self.count_shards(name)
        return 1 if experts % ranks and inner and inner[0] % ranks == 0 else 0

    def _find_shard_dim(self, name: str) -> int | None:
        return self._get_sharding(name).find_shard_dim(name.rpartition(".")[2], self.tensors[name].dim())

    def _get_sharding(self, name: str) -> ModuleSharding:
        return self.shardings[name.rpartition(".")[0]]


BUCKET_NUMEL = 2**24
"""Elements that ZeRO 0 and 1 reduce in one message."""


def add_weights_and_gradients(
    traffic: ExpectedTraffic,
    config: Config,
    parameters: RankParameters,
    microbatches: Sequence[Sequence[Call]],
    first_passes: Sequence[Sequence[Call]] = (),
) -> None:
    """Add the traffic of a rank in one step.

    microbatches: module calls of its stages; first_passes: those of passes without gradients before them.
    """
    size = PRECISIONS[config.train.precision].param_dtype.itemsize
    if parameters.zero == 0:
        _add_replicated(traffic, config, parameters)
    elif parameters.zero == 1:
        _add_sharded_optimizer(traffic, config, parameters)
    else:
        _add_fully_sharded(traffic, config, parameters, microbatches, first_passes)
    for ranks, tied in _find_tied_parameters(parameters).items():
        traffic.all_reduce(
            PIPELINE, sum(parameters.count_local_elements(name) for name in tied) * size, n_ranks=len(ranks)
        )
    partial = sum(parameters.count_local_elements(name) for name in parameters.trained if parameters.is_partial(name))
    traffic.all_reduce(TENSOR, partial * size, times=partial > 0)
    _add_whole_tensor_optimizers(traffic, config, parameters)
    _add_metric_reductions(traffic, config, parameters)
    _add_module_state(traffic, parameters)


def _add_replicated(traffic: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    size = PRECISIONS[config.train.precision].param_dtype.itemsize
    for shard_axes, names in _group_by_shard_axes(parameters, parameters.trained).items():
        axis = name_group(traffic.sizes, REPLICATE, *shard_axes)
        for bucket in _divide_into_buckets(parameters, names):
            traffic.all_reduce(axis, sum(prod(parameters.shapes[name]) for name in bucket) * size)


def _add_sharded_optimizer(traffic: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    precision = PRECISIONS[config.train.precision]
    for shard_axes, names in _group_by_shard_axes(parameters, parameters.trained).items():
        axis = name_group(traffic.sizes, *shard_axes)
        for bucket in _divide_into_buckets(parameters, names):
            n_elements, ranks = sum(map(parameters.count_padded_elements, bucket)), traffic.sizes[axis]
            traffic.reduce_scatter(axis, n_elements * precision.param_dtype.itemsize)
            traffic.all_reduce(REPLICATE, n_elements // ranks * precision.param_dtype.itemsize)
            traffic.all_gather(axis, n_elements // ranks * precision.compute_dtype.itemsize)


def _divide_into_buckets(parameters: RankParameters, names: Sequence[str]) -> list[list[str]]:
    """Group consecutive parameters into buckets of at most `BUCKET_NUMEL` elements, or a single parameter."""
    buckets: list[list[str]] = []
    bucket_numel = BUCKET_NUMEL
    for name in names:
        size = prod(parameters.shapes[name])
        if bucket_numel + size > BUCKET_NUMEL or not buckets:
            buckets.append([])
            bucket_numel = 0
        buckets[-1].append(name)
        bucket_numel += size
    return buckets


def _group_by_shard_axes(parameters: RankParameters, names: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    names_by_axes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        names_by_axes[parameters.list_shard_axes(name)].append(name)
    return names_by_axes


def _add_fully_sharded(
    traffic: ExpectedTraffic,
    config: Config,
    parameters: RankParameters,
    microbatches: Sequence[Sequence[Call]],
    first_passes: Sequence[Sequence[Call]],
) -> None:
    parallel, precision = config.parallel, PRECISIONS[config.train.precision]
    for path, names in _find_fsdp_groups(parameters).items():
        elements = sum(map(parameters.count_padded_elements, names))
        trained = sum(parameters.count_padded_elements(name) for name in names if name in parameters.trained)
        # A block that a stack runs several times (ALBERT's) is resharded after each run.
        runs_per_step = sum(call.path == path for call in microbatches[0]) if path else 1
        if parallel.zero == 2 or (parallel.pp > 1 and parallel.splits_backward):
            # Gathered weights stay until the end of the step.
            gathers = runs_per_step if parallel.pp == 1 else 1
        elif path:
            gathers = sum(_count_block_gathers(path, calls) for calls in (*first_passes, *microbatches))
        elif parallel.pp == 1:
            gathers = len(microbatches)
        else:
            gathers = _count_root_gathers(parameters, len(microbatches))
        reductions = len(microbatches) if parallel.grad_accumulation == "sharded" else 1
        if parallel.pp == 1 and runs_per_step > 1 and len(microbatches) > reductions:
            reductions += 1  # gradients accumulated so far are reduced after the block's first run
        axis = name_group(traffic.sizes, *parameters.list_shard_axes(names[0]))
        shard_bytes = elements // traffic.sizes[axis] * precision.compute_dtype.itemsize
        traffic.all_gather(axis, shard_bytes, times=gathers)
        reductions *= trained > 0
        traffic.reduce_scatter(axis, trained * precision.param_dtype.itemsize, times=reductions)
        shard = trained // traffic.sizes[axis] * precision.param_dtype.itemsize
        traffic.all_reduce(REPLICATE, shard, times=reductions)


def _count_block_gathers(path: str, calls: Sequence[Call]) -> int:
    """Count the all-gathers of a block for one micro-batch: each forward pass, and each backward pass through it.

    FSDP2 prefetches one block ahead, so the frozen block before the first trained one is gathered and not used.
    """
    is_block = any(call.is_layer_output for call in calls if call.path == path)
    order = [call for call in calls if call.is_layer_output or (call.path == path and not is_block)]
    own_calls = [i for i, call in enumerate(order) if call.path == path]
    prefetched = [
        i for i in own_calls if not order[i].has_gradient and i + 1 < len(order) and order[i + 1].has_gradient
    ]
    return len(own_calls) + sum(order[i].has_gradient for i in own_calls) + len(prefetched) * is_block


def _find_fsdp_groups(parameters: RankParameters) -> dict[str, list[str]]:
    """Return module path → parameters that FSDP gathers together: a block, the experts in it, or "" for all others."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in parameters.shapes:
        block = next((path for path in parameters.block_paths if name.startswith(f"{path}.")), "")
        groups[name.rpartition(".")[0] if parameters.is_expert(name) else block].append(name)
    return groups


def _count_root_gathers(parameters: RankParameters, microbatches: int) -> int:
    """Count the all-gathers of parameters outside blocks in a pipeline: for the first pass, and again after each
    backward pass, which reshards them, except the last: that of the rank's first stage."""
    assert parameters.pipeline is not None
    stages = parameters.pipeline.list_stages(parameters.position.pp)
    is_backward = [bool(stage.inputs_with_grad) or _has_trained_parameters(parameters, stage) for stage in stages]
    return 1 + microbatches * sum(is_backward) - is_backward[0]


def _has_trained_parameters(parameters: RankParameters, stage: ExpectedStage) -> bool:
    modules = (parameters.model.get_submodule(path) for point in stage.split_points for path in point.modules)
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _find_tied_parameters(parameters: RankParameters) -> dict[tuple[int, ...], list[str]]:
    """Return pipeline ranks → the trained parameters that exactly these ranks share."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in parameters.trained if parameters.pipeline else ():
        assert parameters.pipeline is not None
        if len(ranks := parameters.pipeline.holders[name]) > 1:
            names_by_ranks[ranks].append(name)
    return names_by_ranks


def _add_whole_tensor_optimizers(traffic: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    """Add all-to-alls of optimizers that need whole tensors: gradients to a tensor's owner, new weights back.

    Tensors are assigned greedily, the largest first, to the rank with the least load.
    """
    parallel, size = config.parallel, PRECISIONS[config.train.precision].param_dtype.itemsize
    ranks = [
        replace(parameters.position, shard=shard, cp=cp, tp=tp)
        for shard in range(parallel.dp_shard)
        for cp in range(parallel.cp)
        for tp in range(parallel.tp)
    ]
    axis = name_group(traffic.sizes, SHARD, CONTEXT, TENSOR)
    own_index = ranks.index(parameters.position)
    for group in parameters.optimizer_groups:
        names = [name for name in group.names if name in parameters.shapes]
        if group.granularity != "whole_tensor" or not names:
            continue
        sizes = {name: parameters.tensors[name].numel() for name in names}
        load_by_rank, gradient_numel, weight_numel = [0] * len(ranks), 0, 0
        for name in sorted(names, key=lambda name: (-sizes[name], name)):
            owner = load_by_rank.index(min(load_by_rank))
            load_by_rank[owner] += sizes[name]
            if owner == own_index:
                weight_numel += sum(
                    parameters.count_local_elements(name, peer) for i, peer in enumerate(ranks) if i != own_index
                )
                continue
            blocks = [parameters.identify_block(name, rank) for rank in ranks]
            if blocks.index(blocks[own_index]) == own_index:  # the first rank with a block sends its gradient
                gradient_numel += parameters.count_local_elements(name)
        traffic.all_to_all(axis, gradient_numel * size)
        traffic.all_to_all(axis, weight_numel * size)


def _add_metric_reductions(traffic: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    """Add the reductions of each loss term's sum and count, and of gradient norms, sharded over tp and replicated."""
    loss_bytes = len(objective_for(config).loss_weights) * 8
    for axis in (SHARD, REPLICATE):
        traffic.all_reduce(axis, loss_bytes, times=2)
    traffic.all_reduce(CONTEXT, loss_bytes)  # sums only: all ranks that share a row know its counts
    traffic.all_reduce(PIPELINE, loss_bytes)
    kinds = {(parameters.is_expert(name), parameters.is_tp_sharded(name)) for name in parameters.tensors}
    expert_bytes, tp_sharded_bytes = (sum(kind[i] for kind in kinds) * 8 for i in range(2))
    if parameters.zero:
        for axis in (SHARD, CONTEXT):
            traffic.all_reduce(axis, len(kinds) * 8 - expert_bytes)
        traffic.all_reduce(EXPERT_SHARD, expert_bytes, times=expert_bytes > 0)
    traffic.all_reduce(PIPELINE, len(kinds) * 8)
    traffic.all_reduce(EXPERT, expert_bytes, times=expert_bytes > 0)
    traffic.all_reduce(TENSOR, tp_sharded_bytes)


def _add_module_state(traffic: ExpectedTraffic, parameters: RankParameters) -> None:
    """Add the reductions of stateful modules' observations, one for all modules with the same ranks."""
    elements: dict[tuple[bool, tuple[int, ...]], int] = defaultdict(int)
    pipeline, pp = parameters.pipeline, parameters.position.pp
    for path, module in parameters.counting_modules.items():
        ranks = pipeline.module_holders.get(path, ()) if pipeline else (pp,)
        if pp in ranks:
            key = parameters.has_partial_gradients(parameters.shardings[path]), ranks
            elements[key] += sum(count.numel() for count in module.observed.values())
    for (is_partial, ranks), count in elements.items():
        for axis in (SHARD, REPLICATE, CONTEXT, *([TENSOR] if is_partial else [])):
            traffic.all_reduce(axis, count * 8)
        traffic.all_reduce(PIPELINE, count * 8, times=len(ranks) > 1, n_ranks=len(ranks))
