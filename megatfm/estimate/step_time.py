"""Time of a step: passes by roofline, traffic on its links, overlap, and the pipeline's schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from megatfm.config import Config
from megatfm.estimate.contrastive import takes_two_passes
from megatfm.estimate.devices import Cluster
from megatfm.estimate.operators import Operator
from megatfm.estimate.part_profile import ModelProfile, PartProfile
from megatfm.estimate.rank_flows import (
    add_context_flows,
    add_expert_flows,
    parts_of,
    rank_flows,
    recomputed_operators,
)
from megatfm.estimate.roofline import Seconds, pass_seconds
from megatfm.estimate.schedule import Timeline, simulate
from megatfm.estimate.stalls import fullest_share
from megatfm.estimate.traffic import (
    Axis,
    Flows,
    axes_of,
    axis_seconds,
    collective_seconds,
    count_all_gathers,
    data_leaves_node,
    join_axes,
    leaves_node,
)
from megatfm.estimate.weights import LocalWeight, rank_bytes
from megatfm.parallel.mesh import CONTEXT, EXPERT, EXPERT_SHARD, PIPELINE, REPLICATE, SHARD, TENSOR

ASYNC_TP_EXPOSED = 0.35
"""Share of tensor-parallel traffic that async TP leaves unhidden (assumed)."""
OVERLAP = 0.9
"""Share of a backward pass that reductions of gradients can overlap: the first bucket comes late."""
WEIGHT_SHARE = 0.5
"""Share of a backward pass that the gradients of weights take, where no matmul tells."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest rank, by cause; of communication only what no computation hides."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    host: float = 0.0
    recompute: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    expert_imbalance: float = 0.0
    data_parallel: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0

    @property
    def step(self) -> float:
        """Sum of all causes."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True)
class PartTime:
    """Seconds of a split point's passes: computing, traffic over tp, cp and ep, and ZeRO's gathers and reductions.
    imbalance: extra time of both passes on the fullest expert-parallel rank; shared_forward, shared_backward: traffic
    over tp, cp and ep on the link of ZeRO's gathers, which wait for it; gathers_once: the first pass of a step does."""

    forward: Seconds
    backward: Seconds
    recompute: float
    sent_forward: float
    sent_backward: float
    context: float
    experts: float
    imbalance: float
    gather: float
    reduce: float
    weight_share: float
    shared_forward: float = 0.0
    shared_backward: float = 0.0
    gathers_once: bool = False

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


@dataclass(frozen=True)
class StepEstimate:
    """Estimated step. flows: of each pipeline rank; busiest: the pipeline rank with the longest passes, whose time it
    is; timeline: of a pipeline; in_flight: stage → most micro-batches between their passes."""

    time: StepTime
    flows: Sequence[Flows]
    busiest: int
    timeline: Timeline | None
    in_flight: Mapping[int, int]


def step_time(
    config: Config,
    cluster: Cluster,
    profile: ModelProfile,
    weights: Sequence[LocalWeight],
    stages: Sequence[Sequence[int]],
    rank_of: Sequence[int],
    microbatches: int,
    *,
    compiled: bool,
) -> StepEstimate:
    """Estimate a step of the busiest pipeline rank."""
    parallel, node = config.parallel, cluster.node
    axes = axes_of(parallel)
    cache: dict[int, PartTime] = {}
    times = []
    for index, part in enumerate(profile.parts):
        if id(part) not in cache:
            cache[id(part)] = part_time(config, cluster, part, index, weights, axes, compiled=compiled)
        times.append(cache[id(part)])
    busiest = max(
        range(parallel.pp),
        key=lambda rank: sum(sum(times[i].total(reduces=False)) for i in parts_of(stages, rank_of, rank)),
    )
    indices = parts_of(stages, rank_of, busiest)
    flows = [rank_flows(config, profile, weights, stages, rank_of, rank, microbatches) for rank in range(parallel.pp)]
    boundary = max((profile.parts[stage[-1]].output_bytes for stage in stages[:-1]), default=0)
    data = _exposed_data(config, cluster, flows[busiest], axes, [times[i] for i in indices], microbatches)
    optimizer = optimizer_seconds(config, cluster, weights, indices)
    exchanges = flows[busiest].select(flows[busiest].by_member)  # of whole tensors, which nothing hides
    optimizer += axis_seconds(exchanges, axes, cluster.node, (SHARD, CONTEXT, TENSOR))
    sharded = parallel.grad_accumulation == "sharded"
    computed = _sum_causes(times, indices, microbatches, sharded)
    if takes_two_passes(config, microbatches):
        computed["recompute"] += microbatches * sum(times[i].total(reduces=False)[0] for i in indices)
    if parallel.pp == 1:
        if parallel.zero >= 2 and not sharded:  # the last micro-batch alone reduces
            reducing, plain = (sum(sum(times[i].total(reduces=reduces)) for i in indices) for reduces in (True, False))
            data += max(0.0, reducing - plain)
        data += sum(times[i].exposed_first_gather for i in indices)
        return StepEstimate(_step(computed, 0.0, data, optimizer), flows, busiest, None, {0: 1})
    transfer = collective_seconds(axes[PIPELINE], node, "send", boundary)
    timeline = simulate(
        parallel.pp_schedule,
        parallel.pp,
        parallel.stages_per_rank,
        microbatches,
        rank_of,
        _stage_seconds(times, stages),
        transfer,
    )
    bubble = timeline.seconds - sum(computed.values())
    time = _step(computed, bubble, data, optimizer)
    return StepEstimate(time, flows, busiest, timeline, timeline.in_flight)


def part_time(
    config: Config,
    cluster: Cluster,
    part: PartProfile,
    index: int,
    weights: Sequence[LocalWeight],
    axes: Mapping[str, Axis],
    *,
    compiled: bool,
) -> PartTime:
    """Estimate the seconds of a split point's two passes."""
    parallel, device, node = config.parallel, cluster.device, cluster.node
    part = with_local_experts(part, parallel.ep)
    fp8 = config.train.precision.startswith("fp8") and part.is_block
    fused = compiled and part.is_block
    forward = pass_seconds(device, part.forward, compiled=fused, fp8=fp8)
    backward = pass_seconds(device, part.backward, compiled=fused, fp8=fp8)
    tp = axes[TENSOR]
    sent_forward, sent_backward = (_sent_seconds(ops, tp, cluster) for ops in (part.forward, part.backward))
    recompute, resent = _recompute_seconds(config, cluster, part, tp, compiled=fused, fp8=fp8)
    exposed = ASYNC_TP_EXPOSED if parallel.async_tp else 1.0
    flows = Flows()
    add_context_flows(flows, config, part, axes[CONTEXT], 1)
    add_expert_flows(flows, config, part, axes[EXPERT], 1)
    experts = axis_seconds(flows, axes, node, (EXPERT,))
    context = axis_seconds(flows, axes, node, (CONTEXT,))
    gather, reduce = _zero_seconds(config, cluster, index, weights, axes)
    data_link = data_leaves_node(parallel.zero, axes, node)
    on_link = {axis.name: leaves_node(axis, node) == data_link for axis in axes.values()}
    exchanged = context * on_link[CONTEXT] + experts * on_link[EXPERT]
    weight_flops = _weight_gradient_flops(part)
    total_flops = sum(op.flops for op in part.backward) or 1.0
    return PartTime(
        forward,
        backward,
        recompute + resent * exposed,
        sent_forward * exposed,
        sent_backward * exposed,
        context,
        experts,
        _imbalance(config, cluster, part, experts, fp8=fp8),
        gather,
        reduce,
        weight_flops / total_flops if part.backward else WEIGHT_SHARE,
        sent_forward * on_link[TENSOR] + exchanged / 3,
        (sent_backward + resent) * on_link[TENSOR] + exchanged * 2 / 3,
        count_all_gathers(config, True, 2) == 1,
    )


def with_local_experts(part: PartProfile, ep: int) -> PartProfile:
    """Return a profile whose grouped matmuls are of the experts of one of `ep` ranks: fewer groups of more rows.

    A rank receives as many rows as it sends, for its own experts alone.
    """
    if ep == 1 or not any(op.name == "_grouped_mm" for op in part.forward):
        return part
    passes = ([_of_local_experts(op, ep, part.weight_numbers) for op in ops] for ops in (part.forward, part.backward))
    forward, backward = passes
    return replace(part, forward=forward, backward=backward)


def _of_local_experts(op: Operator, ep: int, weights: frozenset[int]) -> Operator:
    if op.name != "_grouped_mm" or op.dims is None:
        return op
    groups, m, n, k = op.dims
    local = max(1, groups // ep)
    if weights.isdisjoint(op.reads):  # the gradient of weights sums over rows
        writes = {number: n_bytes * local // groups for number, n_bytes in op.writes.items()}
        return replace(op, dims=(local, m, n, k * groups // local), writes=writes)
    reads = {key: size * local // groups if key in weights else size for key, size in op.reads.items()}
    return replace(op, dims=(local, m * groups // local, n, k), reads=reads)


def _imbalance(config: Config, cluster: Cluster, part: PartProfile, sent: float, *, fp8: bool) -> float:
    """Estimate the seconds of the fullest expert-parallel rank beyond the mean. sent: seconds of the exchanges."""
    matmuls = [op for op in (*part.forward, *part.backward) if op.name == "_grouped_mm"]
    if config.parallel.ep == 1 or not matmuls:
        return 0.0
    tokens = config.train.micro_batch * config.data.sequence_length / config.parallel.cp * config.parallel.ep
    computed = pass_seconds(cluster.device, matmuls, compiled=False, fp8=fp8).matmul
    return (fullest_share(config, tokens) - 1) * (computed + sent)


def _sent_seconds(operators: Sequence[Operator], axis: Axis, cluster: Cluster) -> float:
    return sum(
        collective_seconds(axis, cluster.node, op.collective, op.sent_bytes)
        for op in operators
        if op.kind == "collective"
    )


def _recompute_seconds(
    config: Config, cluster: Cluster, part: PartProfile, tp: Axis, *, compiled: bool, fp8: bool
) -> tuple[float, float]:
    """Estimate the seconds of recomputation in the backward pass, and of its traffic."""
    mode = config.train.recompute
    if mode == "none" or not part.is_block or mode.endswith("%"):
        return 0.0, 0.0
    operators = recomputed_operators(part, mode)
    seconds = pass_seconds(cluster.device, operators, compiled=compiled, fp8=fp8).total
    return seconds, _sent_seconds(operators, tp, cluster)


def _zero_seconds(
    config: Config, cluster: Cluster, index: int, weights: Sequence[LocalWeight], axes: Mapping[str, Axis]
) -> tuple[float, float]:
    """Time of one gather of a part's weights, and of one reduction of their gradients, under ZeRO 2 and 3."""
    parallel, node = config.parallel, cluster.node
    if parallel.zero < 2 or parallel.dp_shard * parallel.dp_replicate == 1:
        return 0.0, 0.0
    gather = reduce = 0.0
    compute = 4 if config.train.precision == "fp32" else 8 if config.train.precision == "fp64" else 2
    size = 2 if parallel.reduce_dtype == "bf16" else max(4, compute)
    for is_expert in (False, True):
        axis = axes[EXPERT_SHARD] if is_expert else axes[SHARD]
        of_part = [w for w in weights if w.is_expert == is_expert and w.parts[:1] == (index,)]
        shard = sum(w.shard(axis.size) for w in of_part)
        if shard:
            gather += collective_seconds(axis, node, "all_gather", shard * compute * (axis.size - 1))
        if shard and parallel.pp == 1:
            reduce += collective_seconds(axis, node, "reduce_scatter", shard * size * (axis.size - 1))
            copies = join_axes([axes[REPLICATE], *([] if is_expert else [axes[CONTEXT]])])
            reduce += collective_seconds(copies, node, "all_reduce", 2 * shard * size * (1 - 1 / copies.size))
    return gather, reduce


def _weight_gradient_flops(part: PartProfile) -> float:
    """FLOPs of the products whose results are gradients of weights: those that sum over tokens."""
    return sum(
        op.flops for op in part.backward if op.kind == "matmul" and op.dims and op.dims[3] > max(op.dims[1:3])
    ) or WEIGHT_SHARE * sum(op.flops for op in part.backward)


def _exposed_data(
    config: Config,
    cluster: Cluster,
    flows: Flows,
    axes: Mapping[str, Axis],
    times: Sequence[PartTime],
    microbatches: int,
) -> float:
    """Estimate the seconds of ZeRO's traffic that the last backward pass does not hide; in pipelines it hides none."""
    parallel = config.parallel
    data_axes = (SHARD, REPLICATE, EXPERT_SHARD, CONTEXT)
    attention = [key for key in flows.sent if key[0] == CONTEXT and key[1] != "all_reduce"]
    hideable = [key for key in flows.sent if key not in flows.by_member and key not in attention]
    if parallel.zero >= 2 and parallel.dp_shard * parallel.dp_replicate > 1:
        if parallel.pp == 1:
            return 0.0
        reductions = flows.select([key for key in hideable if key[1] != "all_gather"])
        return axis_seconds(reductions, axes, cluster.node, data_axes)
    seconds = axis_seconds(flows.select(hideable), axes, cluster.node, data_axes)
    if parallel.pp > 1:
        return seconds
    backward = sum(time.total(reduces=False)[1] - time.shared_backward for time in times)
    return max(0.0, seconds - OVERLAP * backward)


def _sum_causes(
    times: Sequence[PartTime], indices: Sequence[int], microbatches: int, sharded: bool
) -> dict[str, float]:
    """Add up the seconds of a rank's passes by cause."""
    sums = dict.fromkeys(
        (
            "matmul",
            "attention",
            "memory_bound",
            "host",
            "recompute",
            "tensor_parallel",
            "context_parallel",
            "expert_parallel",
            "expert_imbalance",
            "data_parallel",
        ),
        0.0,
    )
    for index in indices:
        time = times[index]
        for seconds in (time.forward, time.backward):
            sums["matmul"] += seconds.matmul
            sums["attention"] += seconds.attention
            sums["memory_bound"] += seconds.pointwise
            sums["host"] += seconds.total - seconds.matmul - seconds.attention - seconds.pointwise
        sums["recompute"] += time.recompute
        sums["tensor_parallel"] += time.sent_forward + time.sent_backward
        sums["context_parallel"] += time.context
        sums["expert_parallel"] += time.experts
        sums["expert_imbalance"] += time.imbalance
        passes = time.forward.total + time.backward.total + time.recompute
        sent = time.sent_forward + time.sent_backward + time.context + time.experts + time.imbalance
        sums["data_parallel"] += sum(time.total(reduces=sharded)) - passes - sent
    return {cause: total * microbatches for cause, total in sums.items()}


def _stage_seconds(times: Sequence[PartTime], stages: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {kind: [] for kind in "FBIW"}
    for stage in stages:
        forward = backward = weight = 0.0
        for index in stage:
            passes = times[index].total(reduces=False)
            forward, backward = forward + passes[0], backward + passes[1]
            weight += times[index].backward.total * times[index].weight_share
        for kind, value in zip("FBIW", (forward, backward, backward - weight, weight), strict=True):
            seconds[kind].append(value)
    return seconds


def _step(computed: Mapping[str, float], bubble: float, data: float, optimizer: float) -> StepTime:
    parts = dict(computed)
    parts["data_parallel"] += data
    return StepTime(**parts, bubble=bubble, optimizer=optimizer)


def optimizer_seconds(config: Config, cluster: Cluster, weights: Sequence[LocalWeight], parts: Sequence[int]) -> float:
    """Estimate the seconds of the optimizer: it reads and writes state and weights, and reads and clips gradients."""
    state = rank_bytes(config, weights, parts)
    gradients = min(state.gradients, state.weights)
    moved = 2 * state.optimizer + 2 * state.weights + 3 * gradients + state.copies
    rate = cluster.device.memory_bandwidth * cluster.device.memory_efficiency
    return moved / rate
