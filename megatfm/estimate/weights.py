"""Weights, gradients and optimizer state of a rank: local shapes under tensor and expert parallelism, then ZeRO."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from megatfm.config import Config, ModelConfig, ParallelConfig
from megatfm.config.ffn import MoEConfig, SoftMoEConfig
from megatfm.describe.description import count_optimizer_state
from megatfm.layers.moe.experts import Experts
from megatfm.optim.parameters import build_optimizer_groups
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import TENSOR
from megatfm.split_points import SplitPoint

BUCKET_NUMEL = 2**24
"""Elements that ZeRO 0 and 1 send in one message (`engines.native.replicated.BUCKET_ELEMENTS`)."""


@dataclass(frozen=True)
class LocalWeight:
    """A parameter as one rank has it before ZeRO."""

    name: str
    numel: int
    """Elements of the full parameter."""
    rows: int
    """Rows on this rank, along the dim that ZeRO shards."""
    row_numel: int
    """Elements of a row."""
    is_expert: bool
    """Whether it belongs to experts that ranks share (`parallel.ep`)."""
    is_trained: bool
    optimizer_bytes: int
    """Bytes of the optimizer's state of the full parameter."""
    parts: tuple[int, ...]
    """Indices of the split points that use it."""
    in_block: bool
    """Whether it belongs to a block of a stack."""
    is_partial: bool = False
    """Whether tensor-parallel ranks sum its gradient."""
    whole_tensor_group: int | None = None
    """Number of the optimizer that needs the whole tensor, such as Muon; None for elementwise optimizers."""

    @property
    def local(self) -> int:
        """Number of elements on a rank before ZeRO."""
        return self.rows * self.row_numel

    def shard(self, ranks: int, rank: int = 0) -> int:
        """Return the elements of one of `ranks` ZeRO ranks, by default of the fullest."""
        rows = -(-self.rows // ranks)
        return max(0, min(rows, self.rows - rank * rows)) * self.row_numel


@dataclass(frozen=True)
class RankBytes:
    """Bytes on a rank: weights, gradients and optimizer state after ZeRO, and what ZeRO gathers and exchanges."""

    weights: int
    """Weights in the optimizer's precision."""
    copies: int
    """Weights in the model's precision, where ZeRO 0 and 1 keep them beside the others."""
    gradients: int
    """Gradients that a step accumulates."""
    optimizer: int
    """State of the optimizer."""
    gathered: int
    """The most that ZeRO 2 and 3 gather at once in a block's backward pass, beside stored shards."""
    reduced: int
    """Gradients that the optimizer reads."""
    regathered: int
    """New weights that ZeRO 1 gathers after the optimizer."""
    keeps_whole_gradients: bool
    """Whether a rank accumulates whole gradients of all of its weights."""
    prefetched: int
    """Part of `gathered` that is prefetched for the next block; none for the last one."""
    gather_buffer: int
    """Buffer of a gather: the last one under ZeRO 2, which keeps it, the one outside of blocks under ZeRO 3."""
    forward_excess: int
    """Gathered bytes of a block's forward pass less those of its backward pass; may be negative."""
    outside_excess: int
    """Gathered bytes outside of blocks less those of a block's backward pass; may be negative."""
    exchanged: int
    """Whole tensors on the way to the ranks that own them, and back."""

    @property
    def at_rest(self) -> int:
        """Bytes between steps."""
        return self.weights + self.copies + self.optimizer


def list_local_weights(
    config: Config, full: nn.Module, layout: ModelLayout, points: Sequence[SplitPoint], local: nn.Module
) -> list[LocalWeight]:
    """List the parameters as a rank of `layout` (tensor parallelism alone) has them, experts divided by `parallel.ep`.

    full: the model on the meta device, not parallelized. local: the parallelized model of `layout`.
    """
    optimizer = count_optimizer_state(config, full, get_item_sizes(config).stored)
    experts = list_expert_names(local)
    whole_tensor_groups = {
        name: number
        for number, group in enumerate(build_optimizer_groups(config.optimizer, full))
        for name in group.names
        if group.granularity == "whole_tensor"
    }
    holders: dict[int, list[int]] = {}
    for index, point in enumerate(points):
        for parameter in {p for path in point.modules for p in local.get_submodule(path).parameters()}:
            holders.setdefault(id(parameter), []).append(index)
    listed = []
    for name, parameter in local.named_parameters():
        sizes, shape = list(layout[name].region[1]), layout[name].shape
        is_expert = name in experts and config.parallel.ep > 1
        if name in experts:
            sizes = _get_expert_sizes(sizes, shape, config.parallel)
        dim = _choose_shard_dim(sizes, name in experts, count_expert_shards(config.parallel), config.parallel.zero)
        rows = sizes[dim] if sizes else 1
        listed.append(
            LocalWeight(
                name=name,
                numel=math.prod(shape),
                rows=rows,
                row_numel=math.prod(sizes) // max(rows, 1),
                is_expert=is_expert,
                is_trained=parameter.requires_grad,
                optimizer_bytes=optimizer.get(name, 0),
                parts=tuple(holders.get(id(parameter), ())),
                in_block=".layers." in name,
                is_partial=TENSOR in layout[name].partial_axes,
                whole_tensor_group=whole_tensor_groups.get(name),
            )
        )
    return listed


def list_expert_names(model: nn.Module) -> frozenset[str]:
    """Return the names of experts' stacked weights."""
    return frozenset(
        f"{path}.{key}"
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for key, _ in module.named_parameters(recurse=False)
    )


def _get_expert_sizes(sizes: list[int], shape: Sequence[int], parallel: ParallelConfig) -> list[int]:
    """Return a rank's sizes of experts' stacked matrices; with "folded", `ep` includes tensor-parallel ranks."""
    if parallel.expert_tp == "folded":
        return [shape[0] // parallel.ep, *shape[1:]]
    return [sizes[0] // parallel.ep, *sizes[1:]]


def count_expert_shards(parallel: ParallelConfig) -> int:
    """Return the ranks over which ZeRO shards experts."""
    return max(1, parallel.expert_mesh_size // parallel.ep) if parallel.ep > 1 else parallel.zero_shards


def _choose_shard_dim(sizes: Sequence[int], is_expert: bool, ranks: int, zero: int) -> int:
    """Return the dim that ZeRO shards: that within each expert if the number of experts does not divide."""
    is_within = is_expert and zero >= 2 and len(sizes) > 1 and sizes[0] % ranks and sizes[1] % ranks == 0
    return 1 if is_within else 0


class ItemSizes(NamedTuple):
    """Bytes of a number."""

    stored: int
    """In the optimizer's weights and in accumulated gradients."""
    computed: int
    """In the weights that the model computes with."""
    reduced: int
    """In gradients on their way to other ranks."""


def get_item_sizes(config: Config) -> ItemSizes:
    """Return the bytes of a number in weights and gradients."""
    stored = 8 if config.train.precision == "fp64" else 4
    computed = stored if config.train.precision in ("fp32", "fp64") else 2
    return ItemSizes(stored, computed, 2 if config.parallel.reduce_dtype == "bf16" else stored)


def accumulates_whole_gradients(config: Config) -> bool:
    """Return whether a rank adds up the whole gradients of several micro-batches before it reduces them."""
    train, parallel = config.train, config.parallel
    microbatches = train.global_batch // (train.micro_batch * parallel.dp_shard * parallel.dp_replicate)
    return microbatches > 1 and parallel.grad_accumulation == "unsharded"


def count_pending_bytes(config: Config, weights: Sequence[LocalWeight], parts: Sequence[int], index: int) -> int:
    """Return the bytes of gradients that wait during the backward pass of split point `index`.

    A weight with several uses, such as a tied table, has an incomplete gradient until its first use has run backward.
    ZeRO 2 and 3 reduce the gradients of weights outside of blocks together, at the end; whole ones of earlier
    micro-batches take up new ones of the same precision at once.
    """
    size, compute, _ = get_item_sizes(config)
    is_fully_sharded = config.parallel.effective_zero >= 2
    waits_outside = is_fully_sharded and not (accumulates_whole_gradients(config) and size == compute)
    waiting = 0
    for weight in (w for w in weights if w.is_trained):
        uses = [i for i in weight.parts if i in parts]
        is_outside = waits_outside and not weight.in_block
        if uses and index < uses[-1] and (is_outside or (len(weight.parts) > 1 and uses[0] <= index)):
            waiting += weight.local
    return waiting * (compute if is_fully_sharded else size)


def count_rank_bytes(config: Config, weights: Sequence[LocalWeight], parts: Sequence[int]) -> RankBytes:
    """Add up the state of some split points on the fullest rank."""
    parallel = config.parallel
    stage_weights = [w for w in weights if any(index in parts for index in w.parts)]
    zero = config.parallel.effective_zero
    size, compute, _ = get_item_sizes(config)
    is_mixed = size != compute
    shards = {w.name: count_shards(w, parallel) if zero else 1 for w in stage_weights}
    stored = {w.name: w.shard(shards[w.name]) for w in stage_weights}
    unsharded_numel = sum(w.local for w in stage_weights)
    # Without mixed precision, ZeRO 1 updates the model's weights in place, which each rank has whole.
    weight_bytes = (unsharded_numel if zero == 1 and not is_mixed else sum(stored.values())) * size
    unsharded = zero < 2 or parallel.pp > 1 or accumulates_whole_gradients(config)
    trained = [w for w in stage_weights if w.is_trained]
    gradients = sum(w.local if unsharded else stored[w.name] for w in trained) * size
    elementwise = [w for w in trained if w.whole_tensor_group is None]
    whole_tensors = [w for w in trained if w.whole_tensor_group is not None]
    owned_bytes, owned = _find_fullest_owner(whole_tensors, parallel)
    optimizer = sum(w.optimizer_bytes * stored[w.name] // w.numel for w in elementwise) + owned_bytes
    exchanged = (sum(stored[w.name] for w in whole_tensors) + 2 * owned) * size if whole_tensors else 0
    copies = unsharded_numel * 2 if zero < 2 and is_mixed else 0
    reduced = sum(stored[w.name] for w in trained) * size
    regathered = 0
    if zero == 1:  # all buffers, and the shard from which the last one is gathered
        regathered = sum(stored[w.name] * shards[w.name] for w in trained) * compute
        regathered += sum(stored[w.name] for w in list_buckets(trained)[-1]) * compute
    return RankBytes(
        weights=weight_bytes,
        copies=copies,
        gradients=gradients,
        optimizer=optimizer,
        reduced=reduced,
        regathered=regathered,
        keeps_whole_gradients=unsharded,
        exchanged=exchanged,
        **_count_gathered_bytes(config, stage_weights),
    )


def _count_gathered_bytes(config: Config, weights: Sequence[LocalWeight]) -> dict[str, int]:
    """Return the fields of `RankBytes` about what ZeRO 2 and 3 gather of a rank's weights."""
    parallel, compute = config.parallel, get_item_sizes(config).computed
    largest, largest_experts = (_list_largest_blocks(weights, is_expert=is_expert) for is_expert in (False, True))
    gathered = prefetched = gather_buffer = forward_excess = outside_excess = 0
    if parallel.effective_zero == 3 and not parallel.splits_backward:
        outside = sum(w.local for w in weights if not w.in_block)
        block, experts = largest[0], largest_experts[0]
        gather_buffer = outside * compute
        prefetched = (sum(largest[1:2]) + sum(largest_experts[1:2])) * compute
        gathered = (outside + block + experts) * compute + prefetched
        # A forward pass keeps what it received until the next gather.
        received = experts if count_expert_shards(parallel) > 1 else 0
        forward_excess = received * compute
        outside_excess = ((received if experts else block) - block - experts) * compute - prefetched
    elif parallel.effective_zero >= 2:
        n_shards = {w: count_shards(w, parallel) for w in weights}
        gathered = sum(w.shard(n) * n for w, n in n_shards.items()) * compute
        gather_buffer = (largest_experts[0] or largest[0]) * compute
    return {
        "gathered": gathered,
        "prefetched": prefetched,
        "gather_buffer": gather_buffer,
        "forward_excess": forward_excess,
        "outside_excess": outside_excess,
    }


def _list_largest_blocks(weights: Sequence[LocalWeight], *, is_expert: bool) -> list[int]:
    """Return blocks' elements on a rank before ZeRO, the largest first, then 0: of experts on several ranks, or of the
    other weights."""
    blocks = count_block_elements([w for w in weights if w.is_expert == is_expert])
    return [*sorted(blocks.values(), reverse=True), 0]


def assign_owners(weights: Iterable[LocalWeight], ranks: int) -> dict[str, int]:
    """Return weight → the rank that owns it, for optimizers of whole tensors: of each group the largest first, to the
    rank that owns the fewest elements."""
    by_group: dict[int, list[LocalWeight]] = defaultdict(list)
    for weight in weights:
        if weight.whole_tensor_group is not None and weight.is_trained:
            by_group[weight.whole_tensor_group].append(weight)
    owners = {}
    for group in by_group.values():
        load = [(0, member) for member in range(ranks)]
        for weight in sorted(group, key=lambda w: (-w.numel, w.name)):
            numel, owner = heapq.heappop(load)
            heapq.heappush(load, (numel + weight.numel, owner))
            owners[weight.name] = owner
    return owners


def _find_fullest_owner(weights: Sequence[LocalWeight], parallel: ParallelConfig) -> tuple[int, int]:
    """Return the bytes of state, and the elements, of the rank that owns most of the whole tensors."""
    ranks = parallel.zero_shards * parallel.tp
    n_bytes, numel = Counter[int](), Counter[int]()
    for name, owner in assign_owners(weights, ranks).items():
        weight = next(w for w in weights if w.name == name)
        n_bytes[owner] += weight.optimizer_bytes
        numel[owner] += weight.numel
    return max(((n_bytes[owner], numel[owner]) for owner in n_bytes), default=(0, 0))


def count_shards(weight: LocalWeight, parallel: ParallelConfig) -> int:
    """Return the ranks over which ZeRO shards a weight."""
    return count_expert_shards(parallel) if weight.is_expert else parallel.zero_shards


def list_buckets(weights: Iterable[LocalWeight]) -> list[list[LocalWeight]]:
    """Group neighbours into the buckets in which ZeRO 0 and 1 reduce, and ZeRO 1 gathers; experts come last."""
    buckets: list[list[LocalWeight]] = []
    for weight in sorted(weights, key=lambda w: w.is_expert):
        if (
            not buckets
            or buckets[-1][0].is_expert != weight.is_expert
            or sum(w.local for w in buckets[-1]) + weight.local > BUCKET_NUMEL
        ):
            buckets.append([])
        buckets[-1].append(weight)
    return buckets


def count_block_elements(weights: Sequence[LocalWeight]) -> Mapping[tuple[int, ...], int]:
    """Return block (the split points that run it) → elements on a rank before ZeRO."""
    sums: dict[tuple[int, ...], int] = {}
    for weight in weights:
        if weight.in_block:
            sums[weight.parts] = sums.get(weight.parts, 0) + weight.local
    return sums


def find_experts_section(model: ModelConfig) -> MoEConfig | SoftMoEConfig | None:
    """Return the config section of a model's experts, from the first kind of block that has some; else None."""
    sections = (kind.ffn for kind in model.layer_kinds)
    return next((ffn for ffn in sections if isinstance(ffn, MoEConfig | SoftMoEConfig)), None)
