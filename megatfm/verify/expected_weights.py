"""Expected traffic of weights, gradients and sums over a step, from what a rank holds under a layout.

ZeRO (Rajbhandari et al. 2020), ties between pipeline ranks, partial gradients, optimizers of whole tensors. No process
group is needed. See `expected.py`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import nn

from megatfm.config import Config, ParallelConfig
from megatfm.engines.interface import PRECISIONS, Stateful
from megatfm.optim.parameters import optimizer_groups
from megatfm.verify.axes import (
    CONTEXT,
    EXPERT,
    EXPERT_SHARD,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshPosition,
    joined,
)
from megatfm.verify.expected_pipeline import ExpectedStage, Stages
from megatfm.verify.module_calls import Call
from megatfm.verify.module_cuts import ModuleCut, block_paths
from megatfm.verify.shrink import objective_for
from megatfm.verify.traffic import ExpectedTraffic

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankParameters:
    """The part of the plain model's parameters on a rank. cuts: module path → how it is cut."""

    model: nn.Module
    cuts: Mapping[str, ModuleCut]
    pipeline: Stages | None
    position: MeshPosition
    parallel: ParallelConfig

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Before the data axes cut them, of the parameters that this pipeline rank's stages use."""
        return {
            name: self.shape_at(name, self.position)
            for name, _ in self.model.named_parameters()
            if self.pipeline is None or self.position.pp in self.pipeline.holders[name]
        }

    @cached_property
    def trained(self) -> list[str]:
        """Names of the parameters held here that have gradients."""
        return [name for name in self.shapes if self.model.get_parameter(name).requires_grad]

    def shape_at(self, name: str, place: MeshPosition) -> Shape:
        """Shapes on a rank before the data axes cut them."""
        shape = list(self.model.get_parameter(name).shape)
        if self.is_expert(name):
            shape[0] //= self.parallel.ep
        dim, parts = self._cut_dim(name), self.parallel.tp
        if dim is not None and parts > 1:
            part_size = -(-shape[dim] // parts)
            shape[dim] = max(0, min(part_size, shape[dim] - part_size * place.tp))
        return tuple(shape)

    def is_expert(self, name: str) -> bool:
        """Whether expert parallelism lays blocks of the parameter on different ranks."""
        return self.parallel.ep > 1 and self._cut(name).are_experts

    def shard_axis(self, name: str) -> str:
        """The axis over which ZeRO cuts the parameter."""
        return EXPERT_SHARD if self.is_expert(name) else SHARD

    def shards(self, name: str) -> int:
        """Ranks along that axis."""
        return (
            self.parallel.expert_mesh_size // self.parallel.ep
            if self.is_expert(name)
            else self.parallel.dp_shard
        )

    @property
    def zero(self) -> int:
        """The stage; 0 if no other rank shares it."""
        return self.parallel.zero if self.parallel.dp_shard * self.parallel.dp_replicate > 1 else 0

    def block(self, name: str, place: MeshPosition) -> tuple[int, ...]:
        """Identify the block of a parameter that a rank holds: equal for ranks with the same block."""
        part = place.edp if self.is_expert(name) else place.shard
        return (
            place.ep if self.is_expert(name) else 0,
            place.tp if self.is_cut(name) else 0,
            part if self.zero else 0,
        )

    def is_cut(self, name: str) -> bool:
        """Whether tensor parallelism lays blocks of the parameter on different ranks, rather than copies."""
        return self.parallel.tp > 1 and self._cut_dim(name) is not None

    def is_partial(self, name: str) -> bool:
        """Whether each tensor-parallel rank has only its share of the gradient."""
        return self.is_partial_style(self._cut(name)) and not self.is_cut(name)

    def is_partial_style(self, cut: ModuleCut) -> bool:
        """Whether what a tensor-parallel rank computes in a module is its share only."""
        partial = cut.gradient == "partial"
        return self.parallel.tp > 1 and (
            partial or (cut.gradient == "partial_with_sp" and self.parallel.sequence_parallel)
        )

    def local_numel(self, name: str, place: MeshPosition | None = None) -> int:
        """Elements of the block that is a rank's, by default this one's, after the data axes cut it."""
        place = place or self.position
        shape, parts = self.shape_at(name, place), self.shards(name) if self.zero else 1
        size = shape[self._data_dim(name)]
        part_size, part = -(-size // parts), place.edp if self.is_expert(name) else place.shard
        return max(0, min(part_size, size - part_size * (part if parts > 1 else 0))) * (prod(shape) // size)

    def padded_numel(self, name: str) -> int:
        """Elements when each data rank's rows are filled up to equally many."""
        shape, ranks = self.shapes[name], self.shards(name)
        size = shape[self._data_dim(name)]
        return ranks * -(-size // ranks) * (prod(shape) // size)

    def _data_dim(self, name: str) -> int:
        """Dimension that the data axes cut: within experts under ZeRO 2 and 3 if the number of experts isn't
        divisible."""
        if not self._cut(name).are_experts or self.zero < 2:
            return 0
        (experts, *inner), ranks = self.shape_at(name, self.position), self.shards(name)
        return 1 if experts % ranks and inner and inner[0] % ranks == 0 else 0

    def _cut_dim(self, name: str) -> int | None:
        return self._cut(name).cut_dim(name.rpartition(".")[2], self.model.get_parameter(name).dim())

    def _cut(self, name: str) -> ModuleCut:
        return self.cuts[name.rpartition(".")[0]]


BUCKET = 2**24
"""Elements that ZeRO 0 and 1 send in one message."""


def weights_and_gradients(
    ledger: ExpectedTraffic,
    config: Config,
    parameters: RankParameters,
    microbatches: Sequence[Sequence[Call]],
    first_passes: Sequence[Sequence[Call]] = (),
) -> None:
    """Add the traffic of one rank in one step. microbatches: the calls of its stages; first_passes: those of passes
    without a gradient before them."""
    size = PRECISIONS[config.train.precision].param_dtype.itemsize
    if parameters.zero == 0:
        _replicated(ledger, config, parameters)
    elif parameters.zero == 1:
        _sharded_optimizer(ledger, config, parameters)
    else:
        _fully_sharded(ledger, config, parameters, microbatches, first_passes)
    for ranks, tied in _tied_parameters(parameters).items():
        ledger.all_reduce(
            PIPELINE, sum(parameters.local_numel(name) for name in tied) * size, among=len(ranks)
        )
    partial = sum(parameters.local_numel(name) for name in parameters.trained if parameters.is_partial(name))
    ledger.all_reduce(TENSOR, partial * size, times=partial > 0)
    _whole_tensors(ledger, config, parameters)
    _metric_reductions(ledger, config, parameters)
    _module_state(ledger, parameters)


def _replicated(ledger: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    size = PRECISIONS[config.train.precision].param_dtype.itemsize
    for shard, names in _by_shard_axis(parameters, parameters.trained).items():
        axis = joined(ledger.sizes, REPLICATE, shard, *_replica_axes(shard)[1:])
        for bucket in _buckets(parameters, names):
            ledger.all_reduce(axis, sum(prod(parameters.shapes[name]) for name in bucket) * size)


def _sharded_optimizer(ledger: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    precision = PRECISIONS[config.train.precision]
    for axis, names in _by_shard_axis(parameters, parameters.trained).items():
        for bucket in _buckets(parameters, names):
            n_elements, ranks = sum(map(parameters.padded_numel, bucket)), ledger.sizes[axis]
            ledger.reduce_scatter(axis, n_elements * precision.param_dtype.itemsize)
            for copies in _replica_axes(axis):
                ledger.all_reduce(copies, n_elements // ranks * precision.param_dtype.itemsize)
            ledger.all_gather(axis, n_elements // ranks * precision.compute_dtype.itemsize)


def _buckets(parameters: RankParameters, names: Sequence[str]) -> list[list[str]]:
    """Neighbours that go in one message: of at most `BUCKET` elements together, or one alone."""
    buckets: list[list[str]] = []
    filled = BUCKET
    for name in names:
        size = prod(parameters.shapes[name])
        if filled + size > BUCKET or not buckets:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


def _replica_axes(shard: str) -> tuple[str, ...]:
    """The axes of copies of what ZeRO cuts over that one."""
    return (REPLICATE, CONTEXT) if shard == SHARD else (REPLICATE,)


def _by_shard_axis(parameters: RankParameters, names: Sequence[str]) -> dict[str, list[str]]:
    names_by_axis: dict[str, list[str]] = defaultdict(list)
    for name in names:
        names_by_axis[parameters.shard_axis(name)].append(name)
    return names_by_axis


def _fully_sharded(
    ledger: ExpectedTraffic,
    config: Config,
    parameters: RankParameters,
    microbatches: Sequence[Sequence[Call]],
    first_passes: Sequence[Sequence[Call]],
) -> None:
    parallel, precision = config.parallel, PRECISIONS[config.train.precision]
    for path, names in _groups(parameters).items():
        elements = sum(map(parameters.padded_numel, names))
        trained = sum(parameters.padded_numel(name) for name in names if name in parameters.trained)
        # A block that a stack runs several times (ALBERT's) is given back after each.
        uses = sum(call.path == path for call in microbatches[0]) if path else 1
        if parallel.zero == 2 or (parallel.pp > 1 and parallel.splits_backward):
            gathers = uses if parallel.pp == 1 else 1  # gathered weights are kept until the end of the step
        elif path:
            gathers = sum(_block_gathers(path, calls) for calls in (*first_passes, *microbatches))
        else:
            gathers = (
                len(microbatches) if parallel.pp == 1 else _root_all_gathers(parameters, len(microbatches))
            )
        reductions = len(microbatches) if parallel.grad_accumulation == "sharded" else 1
        if parallel.pp == 1 and uses > 1 and len(microbatches) > reductions:
            reductions += 1  # what was accumulated of its gradients is reduced after the first use
        axis = parameters.shard_axis(names[0])
        ledger.all_gather(
            axis, elements // ledger.sizes[axis] * precision.compute_dtype.itemsize, times=gathers
        )
        reductions *= trained > 0
        ledger.reduce_scatter(axis, trained * precision.param_dtype.itemsize, times=reductions)
        shard = trained // ledger.sizes[axis] * precision.param_dtype.itemsize
        ledger.all_reduce(joined(ledger.sizes, *_replica_axes(axis)), shard, times=reductions)


def _block_gathers(path: str, calls: Sequence[Call]) -> int:
    """For one micro-batch: for each pass forward, and for each backward where what the block made has a gradient. The
    frozen block that lies before the first of those is gathered with it, in vain: FSDP2 looks one block ahead."""
    is_block = any(call.is_layer_output for call in calls if call.path == path)
    order = [call for call in calls if call.is_layer_output or (call.path == path and not is_block)]
    own_calls = [i for i, call in enumerate(order) if call.path == path]
    prefetched = [
        i for i in own_calls if not order[i].has_gradient and i + 1 < len(order) and order[i + 1].has_gradient
    ]
    return len(own_calls) + sum(order[i].has_gradient for i in own_calls) + len(prefetched) * is_block


def _groups(parameters: RankParameters) -> dict[str, list[str]]:
    """Module that gathers parameters → these: a block, or in it experts; "" is the whole model, for all that lies in
    no block."""
    paths = block_paths(parameters.model)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in parameters.shapes:
        block = next((path for path in paths if name.startswith(f"{path}.")), "")
        groups[name.rpartition(".")[0] if parameters.is_expert(name) else block].append(name)
    return groups


def _root_all_gathers(parameters: RankParameters, microbatches: int) -> int:
    """Count the all-gathers of parameters outside blocks: for the first pass, and again after each backward pass, which
    gives it back, but after the last of all: that is the backward pass of the rank's first stage."""
    assert parameters.pipeline is not None
    stages = parameters.pipeline.of_rank(parameters.position.pp)
    go_back = [bool(stage.returns) or _trains(parameters, stage) for stage in stages]
    return 1 + microbatches * sum(go_back) - go_back[0]


def _trains(parameters: RankParameters, stage: ExpectedStage) -> bool:
    modules = (parameters.model.get_submodule(path) for point in stage.split_points for path in point.modules)
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _tied_parameters(parameters: RankParameters) -> dict[tuple[int, ...], list[str]]:
    """Pipeline ranks → the parameters that these and no others hold."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in parameters.trained if parameters.pipeline else ():
        assert parameters.pipeline is not None
        if len(ranks := parameters.pipeline.holders[name]) > 1:
            names_by_ranks[ranks].append(name)
    return names_by_ranks


def _whole_tensors(ledger: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    """Optimizers that need whole tensors: blocks of gradients go to a tensor's owner, and blocks of weights back.

    Of the tensors that a pipeline rank holds, the largest goes first, to the rank that owns least.
    """
    parallel, size = config.parallel, PRECISIONS[config.train.precision].param_dtype.itemsize
    ranks = [
        replace(parameters.position, shard=shard, cp=cp, tp=tp)
        for shard in range(parallel.dp_shard)
        for cp in (range(parallel.cp) if parallel.ep > 1 else (parameters.position.cp,))
        for tp in range(parallel.tp)
    ]
    axis = joined(ledger.sizes, SHARD, *([CONTEXT] if parallel.ep > 1 else []), TENSOR)
    own_index = ranks.index(parameters.position)
    for group in optimizer_groups(config.optimizer, parameters.model):
        names = [name for name in group.names if name in parameters.shapes]
        if group.granularity != "whole_tensor" or not names:
            continue
        sizes = {name: parameters.model.get_parameter(name).numel() for name in names}
        load, to_owners, from_owner = [0] * len(ranks), 0, 0
        for name in sorted(names, key=lambda name: (-sizes[name], name)):
            owner = load.index(min(load))
            load[owner] += sizes[name]
            if owner == own_index:
                from_owner += sum(
                    parameters.local_numel(name, peer) for i, peer in enumerate(ranks) if i != own_index
                )
            elif (
                next(
                    rank
                    for rank in ranks
                    if parameters.block(name, rank) == parameters.block(name, parameters.position)
                )
                == parameters.position
            ):
                to_owners += parameters.local_numel(name)
        ledger.all_to_all(axis, to_owners * size)
        ledger.all_to_all(axis, from_owner * size)


def _metric_reductions(ledger: ExpectedTraffic, config: Config, parameters: RankParameters) -> None:
    """Once a step: each term's sum and count, and the gradient's norm, of what is cut over tp and of what is not."""
    terms = len(objective_for(config).loss_weights) * 8
    for axis in (SHARD, REPLICATE):
        ledger.all_reduce(axis, terms, times=2)
    ledger.all_reduce(CONTEXT, terms)  # of sums: all that share a row count it whole
    ledger.all_reduce(PIPELINE, terms)
    names = [name for name, _ in parameters.model.named_parameters()]
    kinds = {(parameters.is_expert(name), parameters.is_cut(name)) for name in names}
    experts, cut = (sum(kind[i] for kind in kinds) * 8 for i in range(2))
    if parameters.zero:
        ledger.all_reduce(SHARD, len(kinds) * 8 - experts)
        ledger.all_reduce(EXPERT_SHARD, experts, times=experts > 0)
    ledger.all_reduce(PIPELINE, len(kinds) * 8)
    ledger.all_reduce(EXPERT, experts, times=experts > 0)
    ledger.all_reduce(TENSOR, cut)


def _module_state(ledger: ExpectedTraffic, parameters: RankParameters) -> None:
    """Once a step: what stateful modules observed, those together that are summed over the same ranks."""
    elements: dict[tuple[bool, tuple[int, ...]], int] = defaultdict(int)
    for path, module in parameters.model.named_modules():
        ranks = (
            parameters.pipeline.module_holders.get(path, ())
            if parameters.pipeline
            else (parameters.position.pp,)
        )
        if isinstance(module, Stateful) and parameters.position.pp in ranks:
            key = parameters.is_partial_style(parameters.cuts[path]), ranks
            elements[key] += sum(count.numel() for count in module.observed.values())
    for (is_partial, ranks), count in elements.items():
        for axis in (SHARD, REPLICATE, CONTEXT, *([TENSOR] if is_partial else [])):
            ledger.all_reduce(axis, count * 8)
        ledger.all_reduce(PIPELINE, count * 8, times=len(ranks) > 1, among=len(ranks))
