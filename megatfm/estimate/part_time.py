"""Time of one part of a model: its kernels by roofline, and its traffic over tp, cp, ep and ZeRO's ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatfm.config import Config
from megatfm.estimate.devices import Cluster, Device
from megatfm.estimate.operators import Operator
from megatfm.estimate.part_profile import PartProfile
from megatfm.estimate.rank_flows import add_context_flows, add_expert_flows, list_recomputed_operators
from megatfm.estimate.roofline import Seconds, estimate_pass_seconds
from megatfm.estimate.stalls import estimate_fullest_share
from megatfm.estimate.traffic import (
    Axis,
    Flows,
    count_all_gathers,
    data_leaves_node,
    estimate_axis_seconds,
    estimate_collective_seconds,
    find_zero_axis,
    leaves_node,
)
from megatfm.estimate.weights import LocalWeight, get_item_sizes
from megatfm.parallel.mesh import CONTEXT, EXPERT, REPLICATE, TENSOR

ASYNC_TP_EXPOSED = 0.35
"""Share of tensor-parallel traffic that async TP leaves unhidden (assumed)."""
WEIGHT_SHARE = 0.5
"""Share of a backward pass that the gradients of weights take, where no matmul tells."""


@dataclass(frozen=True)
class PartKernels:
    """Kernels of a split point, and its tensor-parallel collectives, each as (collective, bytes that a rank sends)."""

    forward: Seconds
    """Kernels of the forward pass."""
    backward: Seconds
    """Kernels of the backward pass, without recomputation."""
    recompute: float
    """Seconds of kernels that recomputation runs again."""
    sent_forward: Sequence[tuple[str, float]]
    """Collectives of the forward pass."""
    sent_backward: Sequence[tuple[str, float]]
    """Collectives of the backward pass."""
    sent_again: Sequence[tuple[str, float]]
    """Collectives that recomputation runs again."""
    grouped_matmul: float
    """Seconds of the experts' matmuls in both passes."""
    weight_share: float
    """Share of the backward pass that computes gradients of weights."""


def estimate_part_kernels(
    device: Device, part: PartProfile, recompute: str, ep: int, *, compiled: bool, fp8: bool
) -> PartKernels:
    """Estimate the kernels of a split point's two passes.

    recompute: `train.recompute`. ep: ranks that share experts. compiled, fp8: whether blocks are.
    """
    part = with_local_experts(part, ep)
    compiled, fp8 = compiled and part.is_block, fp8 and part.is_block
    repeated = list_recomputed_operators(part, recompute)
    grouped = [op for op in (*part.forward, *part.backward) if op.name == "_grouped_mm"]
    total_flops = sum(op.flops for op in part.backward) or 1.0
    return PartKernels(
        forward=estimate_pass_seconds(device, part.forward, compiled=compiled, fp8=fp8),
        backward=estimate_pass_seconds(device, part.backward, compiled=compiled, fp8=fp8),
        recompute=estimate_pass_seconds(device, repeated, compiled=compiled, fp8=fp8).total,
        sent_forward=_list_collectives(part.forward),
        sent_backward=_list_collectives(part.backward),
        sent_again=_list_collectives(repeated),
        grouped_matmul=estimate_pass_seconds(device, grouped, compiled=False, fp8=fp8).matmul,
        weight_share=_count_weight_gradient_flops(part) / total_flops if part.backward else WEIGHT_SHARE,
    )


def with_local_experts(part: PartProfile, ep: int) -> PartProfile:
    """Return a profile whose grouped matmuls compute the experts of one of `ep` ranks: fewer groups of more rows.

    A rank receives as many rows as it sends, and all of them are for its own experts.
    """
    if ep == 1 or not part.has_experts:
        return part
    forward, backward = (
        [_with_local_experts(op, ep, part.weight_numbers) for op in operators]
        for operators in (part.forward, part.backward)
    )
    return replace(part, forward=forward, backward=backward)


def _with_local_experts(op: Operator, ep: int, weights: frozenset[int]) -> Operator:
    if op.name != "_grouped_mm" or op.dims is None:
        return op
    groups, m, n, k = op.dims
    local = max(1, groups // ep)
    if weights.isdisjoint(op.reads):  # the gradient of weights sums over rows
        writes = {number: n_bytes * local // groups for number, n_bytes in op.writes.items()}
        return replace(op, dims=(local, m, n, k * groups // local), writes=writes)
    reads = {key: size * local // groups if key in weights else size for key, size in op.reads.items()}
    return replace(op, dims=(local, m * groups // local, n, k), reads=reads)


def _list_collectives(operators: Sequence[Operator]) -> list[tuple[str, float]]:
    return [(op.collective, op.sent_bytes) for op in operators if op.kind == "collective"]


@dataclass(frozen=True)
class PartTime:
    """Seconds of a split point's two passes."""

    forward: Seconds
    """Kernels of the forward pass."""
    backward: Seconds
    """Kernels of the backward pass, without recomputation."""
    recompute: float
    """Recomputation, with its traffic over `tp`."""
    sent_forward: float
    """Traffic over `tp` in the forward pass."""
    sent_backward: float
    """Traffic over `tp` in the backward pass."""
    context: float
    """Traffic over `cp` in both passes."""
    experts: float
    """Traffic over `ep` in both passes."""
    imbalance: float
    """Additional time of the fullest expert-parallel rank in both passes."""
    gather: float
    """One gather of the weights by ZeRO 2 and 3."""
    reduce: float
    """One reduction of the gradients by ZeRO 2 and 3."""
    weight_share: float
    """Share of the backward pass that computes gradients of weights."""
    shared_forward: float = 0.0
    """Traffic over `tp`, `cp` and `ep` in the forward pass on the link of ZeRO's gathers, which wait for it."""
    shared_backward: float = 0.0
    """Traffic on that link in the backward pass."""
    gathers_once: bool = False
    """Whether a step gathers weights once, in its first pass."""

    def total(self, *, reduces: bool) -> tuple[float, float]:
        """Return forward and backward seconds, including gathers and reductions that computation does not hide.

        Traffic on the same link hides nothing: a pass takes at least as long as all of it.
        """
        exchanges = self.context + self.experts + self.imbalance
        forward = self.forward.total + self.sent_forward + exchanges / 3
        backward = self.backward.total + self.recompute + self.sent_backward + exchanges * 2 / 3
        gather = 0.0 if self.gathers_once else self.gather
        overlapped = gather + (self.reduce if reduces else 0.0)
        return max(forward, gather + self.shared_forward), max(backward, overlapped + self.shared_backward)

    @property
    def exposed_first_gather(self) -> float:
        """Seconds of a step's only gather that the first forward pass does not hide."""
        if not self.gathers_once:
            return 0.0
        return max(0.0, self.gather + self.shared_forward - self.total(reduces=False)[0])


def estimate_part_time(
    config: Config,
    cluster: Cluster,
    part: PartProfile,
    kernels: PartKernels,
    index: int,
    weights: Sequence[LocalWeight],
    axes: Mapping[str, Axis],
) -> PartTime:
    """Estimate the seconds of a split point's two passes."""
    parallel, node = config.parallel, cluster.node
    sent_forward, sent_backward, sent_again = (
        sum(estimate_collective_seconds(axes[TENSOR], node, collective, n_bytes) for collective, n_bytes in sent)
        for sent in (kernels.sent_forward, kernels.sent_backward, kernels.sent_again)
    )
    exposed = ASYNC_TP_EXPOSED if parallel.async_tp else 1.0
    flows = Flows()
    add_context_flows(flows, config, part, axes[CONTEXT], 1)
    add_expert_flows(flows, config, part, axes[EXPERT], 1)
    experts = estimate_axis_seconds(flows, axes, node, (EXPERT,))
    context = estimate_axis_seconds(flows, axes, node, (CONTEXT,))
    gather, reduce = _estimate_zero_seconds(config, cluster, index, weights, axes)
    data_link = data_leaves_node(parallel.zero, axes, node)
    on_link = {axis.name: leaves_node(axis, node) == data_link for axis in axes.values()}
    exchanged = context * on_link[CONTEXT] + experts * on_link[EXPERT]
    return PartTime(
        forward=kernels.forward,
        backward=kernels.backward,
        recompute=kernels.recompute + sent_again * exposed,
        sent_forward=sent_forward * exposed,
        sent_backward=sent_backward * exposed,
        context=context,
        experts=experts,
        imbalance=_estimate_imbalance(config, kernels.grouped_matmul, experts),
        gather=gather,
        reduce=reduce,
        weight_share=kernels.weight_share,
        shared_forward=sent_forward * on_link[TENSOR] + exchanged / 3,
        shared_backward=(sent_backward + sent_again) * on_link[TENSOR] + exchanged * 2 / 3,
        gathers_once=count_all_gathers(config, in_block=True, microbatches=2) == 1,
    )


def _estimate_imbalance(config: Config, grouped_matmul: float, sent: float) -> float:
    """Estimate by how many seconds the fullest expert-parallel rank exceeds the mean. sent: seconds of exchanges."""
    if config.parallel.ep == 1 or not grouped_matmul:
        return 0.0
    tokens = config.train.micro_batch * config.data.sequence_length / config.parallel.cp * config.parallel.ep
    return (estimate_fullest_share(config, tokens) - 1) * (grouped_matmul + sent)


def _estimate_zero_seconds(
    config: Config, cluster: Cluster, index: int, weights: Sequence[LocalWeight], axes: Mapping[str, Axis]
) -> tuple[float, float]:
    """Estimate the seconds of one gather of a part's weights, and of one reduction of their gradients.

    Both are 0 below ZeRO 2; in a pipeline, gradients are reduced after all passes.
    """
    parallel, node = config.parallel, cluster.node
    if parallel.effective_zero < 2:
        return 0.0, 0.0
    gather = reduce = 0.0
    _, compute, size = get_item_sizes(config)
    for is_expert in (False, True):
        axis, replicas = find_zero_axis(axes, is_expert=is_expert), axes[REPLICATE]
        part_weights = [w for w in weights if w.is_expert == is_expert and w.parts[:1] == (index,)]
        shard = sum(w.shard(axis.size) for w in part_weights)
        if shard:
            gather += estimate_collective_seconds(axis, node, "all_gather", shard * compute * (axis.size - 1))
        if shard and parallel.pp == 1:
            reduce += estimate_collective_seconds(axis, node, "reduce_scatter", shard * size * (axis.size - 1))
            sent = 2 * shard * size * (1 - 1 / replicas.size)
            reduce += estimate_collective_seconds(replicas, node, "all_reduce", sent)
    return gather, reduce


def _count_weight_gradient_flops(part: PartProfile) -> float:
    """Return the FLOPs of matmuls that compute gradients of weights: those that sum over tokens."""
    return sum(
        op.flops for op in part.backward if op.kind == "matmul" and op.dims and op.dims[3] > max(op.dims[1:3])
    ) or WEIGHT_SHARE * sum(op.flops for op in part.backward)
