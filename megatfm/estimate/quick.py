"""Scores of layouts by the hundred thousand: the model of an estimate with sums over stages instead of operators.

Times and sizes of stages come from running sums over the model's split points, the bubble from the schedule's closed
form. `search.py` estimates the best in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from megatfm.config import Config
from megatfm.estimate.devices import GIB
from megatfm.estimate.estimator import Estimator, compiles
from megatfm.estimate.operators import Operator
from megatfm.estimate.part_profile import PartProfile, add_shared_inputs
from megatfm.estimate.part_time import PartTime, estimate_part_kernels, estimate_part_time
from megatfm.estimate.step_time import OVERLAP
from megatfm.estimate.traffic import Axis, data_leaves_node, estimate_collective_seconds, find_zero_axis, make_axes
from megatfm.estimate.weights import LocalWeight, count_block_elements, count_expert_shards, get_item_sizes
from megatfm.parallel.mesh import EXPERT_SHARD, PIPELINE, REPLICATE

Numbers = NDArray[np.float64]
CACHED_PARTS = 512
"""Parts of which intermediate results are kept: more than layouts with the same tp and cp have."""


@dataclass(frozen=True)
class Score:
    """Score of a layout, close to its full estimate."""

    seconds: float
    """Seconds of a step."""
    n_bytes: float
    """Bytes of the fullest rank."""


def scale_profile(part: PartProfile, factor: int, tokens: int) -> PartProfile:
    """Return the profile of a micro-batch `factor` times as large. tokens: of the profiled micro-batch."""
    if factor == 1:
        return part
    return replace(
        part,
        forward=[_scale_operator(op, factor, tokens, part.weight_numbers) for op in part.forward],
        backward=[_scale_operator(op, factor, tokens, part.weight_numbers) for op in part.backward],
        saved=[replace(tensor, n_bytes=tensor.n_bytes * factor) for tensor in part.saved],
        input_bytes=part.input_bytes * factor,
        output_bytes=part.output_bytes * factor,
        shared_input_bytes=part.shared_input_bytes * factor,
        waiting_gradients={name: n_bytes * factor for name, n_bytes in part.waiting_gradients.items()},
        forward_peak=part.forward_peak * (factor if part.is_block else 1),
        backward_peak=part.backward_peak * factor,
    )


def _scale_operator(op: Operator, factor: int, tokens: int, weights: frozenset[int]) -> Operator:
    dims = op.dims
    is_weight_gradient = False
    if dims is not None:
        batch, m, n, k = dims
        is_weight_gradient = k % tokens == 0 and batch == 1
        if op.name == "_grouped_mm":
            is_weight_gradient = weights.isdisjoint(op.reads)
        dims = (batch, m, n, k * factor) if is_weight_gradient else (batch, m * factor, n, k)
    reads = {n: b if n in weights else b * factor for n, b in op.reads.items()}
    writes = {n: b if is_weight_gradient or n in weights else b * factor for n, b in op.writes.items()}
    return replace(
        op, dims=dims, flops=op.flops * factor, reads=reads, writes=writes, sent_bytes=op.sent_bytes * factor
    )


@dataclass(frozen=True)
class Passes:
    """Passes of all split points."""

    sums: Numbers
    """Running sums over split points. Its rows are the first five fields of `RankSums`, then saved bytes."""
    workspace: float
    """Bytes of the largest workspace of a block."""
    boundary: float
    """Bytes of the largest output of a block, which a stage may send to the next."""


@dataclass(frozen=True)
class PartPasses:
    """Passes of one split point."""

    profile: PartProfile
    time: PartTime
    saved_bytes: int
    """Bytes saved between the passes."""
    recomputed_bytes: int
    """Bytes of tensors that recomputation makes anew for the backward pass."""


@dataclass(frozen=True)
class RankSums:
    """Sums over the split points of each pipeline rank, as arrays by rank."""

    forward: Numbers
    """Seconds of a micro-batch's forward pass."""
    backward: Numbers
    """Seconds of its backward pass."""
    weight_gradients: Numbers
    """Seconds of the backward pass that compute gradients of weights."""
    shared_forward: Numbers
    """Seconds of traffic in the forward pass, on the link of data parallelism."""
    shared_backward: Numbers
    """Seconds of traffic on that link in the backward pass."""
    dense: Numbers
    """Elements of weights before ZeRO, without those of experts that ranks share."""
    experts: Numbers
    """Elements of the experts that ranks share."""
    outside: Numbers
    """Elements of weights outside of blocks."""


@dataclass(frozen=True)
class StageSums:
    """Stages of a pipeline, for sums over them."""

    bounds: NDArray[np.int64]
    """First split point of each stage, then the number of split points."""
    rank_of: Sequence[int]
    """Stage → pipeline rank."""
    to_rank: Numbers
    """[stages, ranks]: 1 where a rank has a stage, else 0."""
    is_sender: Numbers
    """1 for a stage whose output goes to another rank, else 0."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], rank_of: Sequence[int], ranks: int) -> "StageSums":
        """Make them of the number of split points in each stage."""
        rank = np.asarray(rank_of)
        is_sender = np.append(rank[1:] != rank[:-1], False).astype(float)
        return cls(np.cumsum([0, *lengths]), rank_of, np.eye(ranks)[rank], is_sender)

    def sum_stages(self, sums: Numbers) -> Numbers:
        """Return each stage's share of running sums [rows, split points + 1]."""
        at_bounds = sums[:, self.bounds]
        return at_bounds[:, 1:] - at_bounds[:, :-1]


class QuickScores:
    """Scores of layouts of an estimator's model."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.cluster = estimator, estimator.cluster
        self._passes: dict[object, Passes] = {}
        self._is_compiled: dict[object, bool] = {}
        self._sizes: dict[object, tuple[Numbers, float]] = {}
        self._stages: dict[object, StageSums] = {}
        self._scale_profile = lru_cache(CACHED_PARTS)(scale_profile)
        self._part_kernels = lru_cache(CACHED_PARTS)(partial(estimate_part_kernels, self.cluster.device))
        self._saved_bytes = lru_cache(CACHED_PARTS)(PartProfile.count_saved_bytes)

    def score(self, config: Config, microbatches: int) -> Score:
        """Score a legal layout, whose `dp_shard` is known."""
        parallel = config.parallel
        axes = make_axes(parallel)
        passes = self._get_passes(config, axes)
        stages = self._get_stages(config)
        numels, largest_block = self._sum_weights(config)
        by_stage = stages.sum_stages(passes.sums)
        sums = RankSums(*(by_stage[:-1] @ stages.to_rank), *(stages.sum_stages(numels) @ stages.to_rank))
        in_flight = estimate_in_flight(
            parallel.pp_schedule if parallel.pp > 1 else "1f1b",
            parallel.pp,
            parallel.stages_per_rank,
            microbatches,
            stages.rank_of,
        )
        saved = ((by_stage[-1] + stages.is_sender * passes.boundary) * in_flight) @ stages.to_rank
        n_bytes = self._count_state_bytes(config, microbatches, sums, largest_block) + saved
        reserved = self.cluster.device.reserved_gib * GIB
        seconds = self._estimate_seconds(config, microbatches, axes, sums, passes.boundary)
        return Score(seconds, float(n_bytes.max()) + passes.workspace + reserved)

    def _count_state_bytes(self, config: Config, microbatches: int, sums: RankSums, largest_block: float) -> Numbers:
        """Return the bytes of state, gradients and gathered weights of each pipeline rank. largest_block: elements."""
        parallel = config.parallel
        zero = parallel.effective_zero
        size, compute, _ = get_item_sizes(config)
        is_mixed = size != compute
        edp = count_expert_shards(parallel)
        unsharded_numel = sums.dense + sums.experts
        shard = sums.dense / parallel.zero_shards + sums.experts / edp if zero else unsharded_numel
        unsharded = zero < 2 or parallel.pp > 1 or (microbatches > 1 and parallel.grad_accumulation == "unsharded")
        total = (unsharded_numel if zero == 1 and not is_mixed else shard) * size
        total = (
            total
            + (unsharded_numel if unsharded else shard) * size
            + shard * self.estimator.description.optimizer_bytes
        )
        if zero < 2:
            return total + (unsharded_numel * 2 if is_mixed else 0)
        if zero == 2 or parallel.splits_backward:
            total = total + unsharded_numel * compute
        else:
            total = total + (sums.outside + 2 * largest_block) * compute
        return total + (0 if unsharded else largest_block * (compute + size))

    def _estimate_seconds(
        self, config: Config, microbatches: int, axes: dict[str, Axis], sums: RankSums, boundary: float
    ) -> float:
        """Return the seconds of a step. boundary: bytes that a stage sends."""
        parallel, data = config.parallel, 0.0
        if parallel.zero_shards * parallel.dp_replicate > 1:
            gather, reduce = self._estimate_data_seconds(config, axes, sums)
            free = sums.backward - sums.shared_backward  # of the link
            if parallel.zero == 3 and not parallel.splits_backward:
                sharded = parallel.grad_accumulation == "sharded"
                forward = np.maximum(sums.forward, gather + sums.shared_forward)
                overlapped = gather + (reduce if sharded else 0.0)
                data = 0.0 if sharded else max(0.0, reduce + gather - float(free.max())) * (parallel.pp == 1)
                data = reduce if parallel.pp > 1 else data
                backward = np.maximum(sums.backward, overlapped + sums.shared_backward)
                sums = replace(sums, forward=forward, backward=backward)
            else:
                hidden = float(free.max()) * OVERLAP if parallel.pp == 1 else 0.0
                data = max(0.0, reduce + gather - hidden)
        step = microbatches * float((sums.forward + sums.backward).max())
        return step + self._estimate_bubble(config, sums, boundary, axes[PIPELINE]) + data

    def _estimate_data_seconds(self, config: Config, axes: dict[str, Axis], sums: RankSums) -> tuple[float, float]:
        """Return the seconds in which ZeRO gathers all weights once, and reduces all gradients once."""
        node = self.cluster.node
        shard, copies, edp = find_zero_axis(axes, is_expert=False), axes[REPLICATE], axes[EXPERT_SHARD]
        _, compute, size = get_item_sizes(config)
        n_dense, n_expert = float(sums.dense.max()), float(sums.experts.max())
        gather = estimate_collective_seconds(shard, node, "all_gather", n_dense * compute * (1 - 1 / shard.size))
        gather += estimate_collective_seconds(edp, node, "all_gather", n_expert * compute * (1 - 1 / edp.size))
        reduce = estimate_collective_seconds(shard, node, "all_gather", n_dense * size * (1 - 1 / shard.size))
        reduce += estimate_collective_seconds(edp, node, "all_gather", n_expert * size * (1 - 1 / edp.size))
        shards = n_dense / shard.size + n_expert / edp.size
        return gather, reduce + estimate_collective_seconds(copies, node, "all_reduce", 2 * shards * size)

    def _estimate_bubble(self, config: Config, sums: RankSums, boundary: float, axis: Axis) -> float:
        """Return the idle seconds of the busiest rank by the schedules' closed forms, and of the first micro-batch's
        transfers. boundary: bytes of a transfer."""
        parallel = config.parallel
        if parallel.pp == 1:
            return 0.0
        microbatch, weight = float((sums.forward + sums.backward).max()), float(sums.weight_gradients.max())
        transfer = estimate_collective_seconds(axis, self.cluster.node, "send", boundary)
        idle = {
            "interleaved": microbatch / parallel.stages_per_rank,
            "interleaved-zero-bubble": max(0.0, microbatch - 2 * weight) / parallel.stages_per_rank,
            "zbv": max(0.0, microbatch - 3 * weight) / 2,
            "dualpipev": max(0.0, microbatch - 2 * weight) / 2,
        }.get(parallel.pp_schedule, microbatch)
        return (parallel.pp - 1) * (idle + 2 * transfer * parallel.stages_per_rank)

    def _get_passes(self, config: Config, axes: Mapping[str, Axis]) -> Passes:
        parallel, train = config.parallel, config.train
        compiled = self._compiles(config)
        key = (parallel.tp, parallel.cp, parallel.ep, parallel.expert_tp, parallel.cp_method, train.micro_batch)
        is_on_network = data_leaves_node(parallel.zero, axes, self.cluster.node)
        full_key = (*key, train.recompute, compiled, parallel.async_tp, parallel.zero >= 2, is_on_network)
        if full_key not in self._passes:
            single_row = config.model_copy(update={"train": train.model_copy(update={"micro_batch": 1})})
            profile = self.estimator.profile(single_row)
            tokens = max(1, config.data.sequence_length // parallel.cp)
            fp8 = train.precision.startswith("fp8")
            times: dict[PartProfile, PartPasses] = {}
            for index, part in enumerate(profile.parts):
                if part not in times:
                    scaled = self._scale_profile(part, train.micro_batch, tokens)
                    ep = parallel.ep if part.has_experts else 1
                    kernels = self._part_kernels(scaled, train.recompute, ep, compiled=compiled, fp8=fp8)
                    time = estimate_part_time(config, self.cluster, scaled, kernels, index, (), axes)
                    saved = self._saved_bytes(scaled, train.recompute, compiled)
                    recomputed = 0
                    if part.is_block and train.recompute != "none":
                        recomputed = self._saved_bytes(scaled, "none", compiled) - saved
                    times[part] = PartPasses(scaled, time, saved, recomputed)
            self._passes[full_key] = _sum_passes([times[part] for part in profile.parts])
        return self._passes[full_key]

    def _compiles(self, config: Config) -> bool:
        """Return whether blocks are compiled, which depends on few keys of the layout."""
        parallel = config.parallel
        key = parallel.pp > 1 and parallel.splits_backward, config.train.recompute
        if key not in self._is_compiled:
            self._is_compiled[key] = compiles(config, self.cluster.device)
        return self._is_compiled[key]

    def _sum_weights(self, config: Config) -> tuple[Numbers, float]:
        """Return running sums over split points: of dense and expert elements, and of those outside blocks; and the
        largest block's elements."""
        parallel = config.parallel
        key = parallel.tp, parallel.ep, parallel.expert_tp
        if key not in self._sizes:
            weights = self.estimator.list_local_weights(config)
            n = 1 + max(index for w in weights for index in w.parts)
            sums = (
                _sum_numel(weights, n, lambda w: not w.is_expert),
                _sum_numel(weights, n, lambda w: w.is_expert),
                _sum_numel(weights, n, lambda w: not w.in_block),
            )
            self._sizes[key] = np.stack(sums), max(count_block_elements(weights).values(), default=0)
        return self._sizes[key]

    def _get_stages(self, config: Config) -> StageSums:
        parallel = config.parallel
        pipeline = self.estimator.plan_pipeline(config) if parallel.pp > 1 else None
        if id(pipeline) not in self._stages:
            if pipeline is None:
                stages = StageSums.from_lengths([len(self.estimator.get_split_points(config))], [0], 1)
            else:
                lengths = [len(stage.split_points) for stage in pipeline.stages]
                stages = StageSums.from_lengths(lengths, pipeline.stage_to_rank, parallel.pp)
            self._stages[id(pipeline)] = stages
        return self._stages[id(pipeline)]


def estimate_in_flight(schedule: str, ranks: int, virtual: int, microbatches: int, rank_of: Sequence[int]) -> Numbers:
    """Return the most micro-batches of each stage between their two passes, by the schedules' closed forms.

    A rank of an interleaved schedule runs 2(p − r − 1) + (v − 1)p forward passes before its first backward pass
    (Narayanan et al. 2021, section 2.2); V schedules have p micro-batches of each stage in flight.
    """
    if schedule == "gpipe":
        return np.full(len(rank_of), float(microbatches))
    if schedule == "1f1b":
        return np.minimum(ranks - np.asarray(rank_of), microbatches).astype(float)
    if schedule.startswith("interleaved"):
        n_forwards = 2 * (ranks - np.asarray(rank_of) - 1) + (virtual - 1) * ranks + 1
        return np.minimum(n_forwards / virtual, microbatches)
    return np.full(len(rank_of), float(min(ranks, microbatches)))


def _sum_numel(weights: Sequence[LocalWeight], n: int, is_counted: Callable[[LocalWeight], bool]) -> Numbers:
    sizes = np.zeros(n + 1)
    for weight in weights:
        if is_counted(weight):
            for index in weight.parts:
                sizes[index + 1] += weight.local
    return np.cumsum(sizes)


def _sum_passes(parts: Sequence[PartPasses]) -> Passes:
    passes = [part.time.total(reduces=False) for part in parts]
    weight = [part.time.backward.total * part.time.weight_share for part in parts]
    shared = [part.time.shared_forward for part in parts], [part.time.shared_backward for part in parts]
    blocks = {part.profile: part for part in parts if part.profile.is_block}
    workspace = max(
        max(block.forward_peak, block.backward_peak + part.recomputed_bytes) for block, part in blocks.items()
    )
    boundary = max(block.output_bytes for block in blocks)
    saved = add_shared_inputs([part.profile for part in parts], [part.saved_bytes for part in parts])
    rows = [*zip(*passes, strict=True), weight, *shared, saved]
    return Passes(np.array([np.cumsum([0.0, *row]) for row in rows]), workspace, boundary)
