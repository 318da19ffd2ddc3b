"""Time of a step: passes by roofline, traffic on its links, overlap, and the pipeline's schedule."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from megatfm.config import Config
from megatfm.estimate.devices import Cluster
from megatfm.estimate.part_profile import ModelProfile
from megatfm.estimate.part_time import PartTime, estimate_part_kernels, estimate_part_time
from megatfm.estimate.rank_flows import StageSplit, compute_rank_flows
from megatfm.estimate.schedule import Timeline, simulate
from megatfm.estimate.traffic import (
    Axis,
    Flows,
    add_data_flows,
    estimate_axis_seconds,
    estimate_collective_seconds,
    make_axes,
    takes_two_passes,
)
from megatfm.estimate.weights import LocalWeight, count_rank_bytes
from megatfm.parallel.mesh import CONTEXT, EXPERT_SHARD, PIPELINE, REPLICATE, SHARD, TENSOR

OVERLAP = 0.9
"""Share of a backward pass that reductions of gradients can overlap: the first bucket comes late."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest rank, by cause. Communication that computation hides does not count."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    """Pointwise kernels, which memory bounds."""
    host: float = 0.0
    """Time in which the device waits for the host's launches."""
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
class StepEstimate:
    """Estimated step."""

    time: StepTime
    """Time of the busiest pipeline rank."""
    flows: Sequence[Flows]
    """Traffic of each pipeline rank."""
    busiest: int
    """Pipeline rank with the longest passes."""
    timeline: Timeline | None
    """Passes of all ranks; None without a pipeline."""


def estimate_step(
    config: Config,
    cluster: Cluster,
    profile: ModelProfile,
    weights: Sequence[LocalWeight],
    stages: StageSplit,
    microbatches: int,
    *,
    compiled: bool,
) -> StepEstimate:
    """Estimate a step of the busiest pipeline rank."""
    parallel, node, axes = config.parallel, cluster.node, make_axes(config.parallel)
    times = _estimate_part_times(config, cluster, profile, weights, compiled=compiled)
    busiest = max(
        range(parallel.pp), key=lambda rank: sum(sum(times[i].total(reduces=False)) for i in stages.list_parts(rank))
    )
    indices = stages.list_parts(busiest)
    flows = [compute_rank_flows(config, profile, weights, stages, rank, microbatches) for rank in range(parallel.pp)]
    boundary = max((profile.parts[parts[-1]].output_bytes for parts in stages.parts[:-1]), default=0)
    weight_flows = Flows()
    add_data_flows(weight_flows, config, weights, indices, microbatches)
    data_flows = _select_data_flows(flows[busiest], weight_flows)
    data = _estimate_exposed_data(config, cluster, data_flows, axes, [times[i] for i in indices])
    optimizer = estimate_optimizer_seconds(config, cluster, weights, indices, microbatches)
    exchanges = weight_flows.select(weight_flows.by_member)  # of whole tensors, which nothing hides
    optimizer += estimate_axis_seconds(exchanges, axes, cluster.node, (SHARD, CONTEXT, TENSOR))
    sharded = parallel.grad_accumulation == "sharded"
    computed = _sum_causes(times, indices, microbatches, sharded)
    if takes_two_passes(config, microbatches):
        computed["recompute"] += microbatches * sum(times[i].total(reduces=False)[0] for i in indices)
    if parallel.pp == 1:
        if parallel.zero >= 2 and not sharded:  # the last micro-batch alone reduces
            reducing, plain = (sum(sum(times[i].total(reduces=reduces)) for i in indices) for reduces in (True, False))
            data += max(0.0, reducing - plain)
        data += sum(times[i].exposed_first_gather for i in indices)
        return StepEstimate(_make_step_time(computed, 0.0, data, optimizer), flows, busiest, None)
    transfer = estimate_collective_seconds(axes[PIPELINE], node, "send", boundary)
    timeline = simulate(
        parallel.pp_schedule,
        parallel.pp,
        parallel.stages_per_rank,
        microbatches,
        stages.rank_of,
        _sum_stage_seconds(times, stages.parts),
        transfer,
    )
    bubble = timeline.seconds - sum(computed.values())
    time = _make_step_time(computed, bubble, data, optimizer)
    return StepEstimate(time, flows, busiest, timeline)


def _estimate_part_times(
    config: Config, cluster: Cluster, profile: ModelProfile, weights: Sequence[LocalWeight], *, compiled: bool
) -> list[PartTime]:
    """Return the times of all parts; a part that occurs several times is estimated once."""
    parallel, fp8 = config.parallel, config.train.precision.startswith("fp8")
    axes, time_by_part = make_axes(parallel), dict[int, PartTime]()
    for index, part in enumerate(profile.parts):
        if id(part) not in time_by_part:
            kernels = estimate_part_kernels(
                cluster.device, part, config.train.recompute, parallel.ep, compiled=compiled, fp8=fp8
            )
            time_by_part[id(part)] = estimate_part_time(config, cluster, part, kernels, index, weights, axes)
    return [time_by_part[id(part)] for part in profile.parts]


def _select_data_flows(flows: Flows, weight_flows: Flows) -> Flows:
    """Return the part of a rank's traffic that computation may hide: weights and gradients.

    weight_flows: those of `add_data_flows`. Keys and values may use the same collectives over `cp`, so on that axis
    these alone are taken.
    """
    selected = flows.select([key for key in flows.sent if key not in weight_flows.by_member and key[0] != CONTEXT])
    over_context = [key for key in weight_flows.sent if key not in weight_flows.by_member and key[0] == CONTEXT]
    for key in over_context:
        selected.sent[key], selected.calls[key] = weight_flows.sent[key], weight_flows.calls[key]
    return selected


def _estimate_exposed_data(
    config: Config, cluster: Cluster, flows: Flows, axes: Mapping[str, Axis], times: Sequence[PartTime]
) -> float:
    """Estimate the seconds of ZeRO's traffic that the last backward pass does not hide; in pipelines it hides none.

    flows: see `_select_data_flows`.
    """
    parallel = config.parallel
    data_axes = (SHARD, REPLICATE, EXPERT_SHARD, CONTEXT)
    if parallel.effective_zero >= 2:
        if parallel.pp == 1:
            return 0.0
        reductions = flows.select([key for key in flows.sent if key[1] != "all_gather"])
        return estimate_axis_seconds(reductions, axes, cluster.node, data_axes)
    seconds = estimate_axis_seconds(flows, axes, cluster.node, data_axes)
    if parallel.pp > 1:
        return seconds
    backward = sum(time.total(reduces=False)[1] - time.shared_backward for time in times)
    return max(0.0, seconds - OVERLAP * backward)


def _sum_causes(
    times: Sequence[PartTime], indices: Sequence[int], microbatches: int, sharded: bool
) -> dict[str, float]:
    """Add up the seconds of a rank's passes by cause."""
    sums: defaultdict[str, float] = defaultdict(float)
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


def _sum_stage_seconds(times: Sequence[PartTime], parts_by_stage: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Return kind of pass → seconds of each stage. Kinds: forward, backward, and the halves of a split backward pass,
    gradients of inputs and of weights (see `parallel.pipeline_schedule.Kind`)."""
    seconds: dict[str, list[float]] = {kind: [] for kind in "FBIW"}
    for parts in parts_by_stage:
        forward = backward = weight = 0.0
        for index in parts:
            passes = times[index].total(reduces=False)
            forward, backward = forward + passes[0], backward + passes[1]
            weight += times[index].backward.total * times[index].weight_share
        for kind, value in zip("FBIW", (forward, backward, backward - weight, weight), strict=True):
            seconds[kind].append(value)
    return seconds


def _make_step_time(computed: Mapping[str, float], bubble: float, data: float, optimizer: float) -> StepTime:
    parts = dict(computed)
    parts["data_parallel"] += data
    return StepTime(**parts, bubble=bubble, optimizer=optimizer)


def estimate_optimizer_seconds(
    config: Config, cluster: Cluster, weights: Sequence[LocalWeight], parts: Sequence[int], microbatches: int
) -> float:
    """Estimate the seconds of the optimizer: it reads and writes state and weights, and reads and clips gradients.

    Of a measured device, those of adding up the gradients of micro-batches count, too.
    """
    state = count_rank_bytes(config, weights, parts)
    gradients = min(state.gradients, state.weights)
    moved = 2 * state.optimizer + 2 * state.weights + 3 * gradients + state.copies
    device = cluster.device
    if device.update_seconds is not None:
        per_tensor, per_byte = device.update_seconds
        n_tensors = sum(not set(weight.parts).isdisjoint(parts) for weight in weights)
        added = microbatches * device.gradient_seconds * state.gradients
        return per_tensor * n_tensors + per_byte * moved + added
    return moved / (device.memory_bandwidth * device.memory_efficiency)
