"""Time that a run loses: to checkpoints, to late data, to unevenly loaded experts, and to failures.

A run fails at the rate of its GPUs together. Each failure loses the time since the last checkpoint, half an interval on
average, and that of a restart. The best interval is √(2 · save · time between failures) (Young 1974).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from megatfm.config import Config
from megatfm.config.ffn import MoEConfig
from megatfm.estimate.devices import Cluster
from megatfm.estimate.memory import RankMemory
from megatfm.estimate.weights import find_experts_section
from megatfm.objectives import reads_text

if TYPE_CHECKING:
    from megatfm.estimate.estimator import Estimate

COPY_BANDWIDTH = 20e9
"""Bytes a second at which a background save copies a GPU's state to host memory; training waits (PCIe 4 and 5)."""
TOKENS_PER_SECOND = 36.7e6
"""Tokens that one core reads and packs (benchmarks/results/2026-11-22-data.md)."""
SECONDS_PER_IMAGE = 1.52e-3
"""Seconds of one core for an image of 500 × 375, from the shard to the row (2026-11-24-vision-loader.md)."""
QUANTILE = 0.9
"""Share of steps in which no expert-parallel rank has more tokens than the estimate counts."""
MAX_VIOLATION = {"deepseek_v3": 0.04, "hash": 0.0, "expert_choice": 0.0}
"""Load of the fullest expert over the mean, minus 1, by router (Wang et al. 2024, arXiv 2408.15664, table 2: "MaxVio"
of their 1B model with biases; hash and expert-choice routers are even but for chance)."""
AUX_LOSS_MAX_VIOLATION = 0.72
"""Violation with an auxiliary loss, which all other routers have."""
MEASURED_EXPERTS = 64
"""Experts of the models in that table."""
GPU_MTBF_YEARS = 50_000 / 24 / 365.25
"""Mean time between failures of one GPU with its share of a node: Llama 3 had 419 unexpected interruptions in 54 days
on 16,384 GPUs (Grattafiori et al. 2024, section 3.3.4), one in 50,700 GPU hours."""
RESTART_SECONDS = 600.0
"""Seconds from a failure to the next step: detection, start of processes, loading (assumed)."""


@dataclass(frozen=True)
class CheckpointTime:
    """Seconds of one save. write: until it is on the disk; stall: while training waits."""

    write: float
    stall: float


def estimate_checkpoint_time(config: Config, cluster: Cluster, memory: Sequence[RankMemory]) -> CheckpointTime:
    """Estimate a save of weights and optimizer, written by all of a node's ranks over its link to the disk."""
    state = max(rank.weights + rank.optimizer for rank in memory)
    write = state * min(cluster.gpus, cluster.node.gpus) / cluster.node.disk_bandwidth
    return CheckpointTime(write, state / COPY_BANDWIDTH if config.checkpoint.mode == "async" else write)


def estimate_checkpoint_stall(config: Config, cluster: Cluster, memory: Sequence[RankMemory], step: float) -> float:
    """Estimate the seconds of checkpoints per step, on average. step: seconds without them.

    A background save that outlasts the steps before the next save makes that one wait.
    """
    save, every = estimate_checkpoint_time(config, cluster, memory), config.checkpoint.every
    late = save.write - every * step if config.checkpoint.mode == "async" else 0.0
    return (save.stall + max(0.0, late)) / every


def estimate_data_seconds(config: Config) -> float:
    """Estimate the seconds in which a rank's loader packs the rows of a step, with `data.workers` processes."""
    parallel, data = config.parallel, config.data
    rows = config.train.global_batch / (parallel.dp_shard * parallel.dp_replicate)
    if not reads_text(config.objective.name):
        return rows * SECONDS_PER_IMAGE / max(1, data.workers)
    tokens = data.sequence_length + (data.target_length or 0)
    return rows * tokens / TOKENS_PER_SECOND / max(1, data.workers)


def estimate_data_stall(config: Config, step: float) -> float:
    """Estimate the seconds of a step in which the device waits for rows. step: seconds of computing meanwhile."""
    return max(0.0, estimate_data_seconds(config) - step)


def estimate_fullest_share(config: Config, tokens: float, quantile: float = QUANTILE) -> float:
    """Estimate the fullest expert-parallel rank's load over the mean, exceeded in 1 − quantile of the steps.

    tokens: of one micro-batch, over all ranks that share experts. Loads are modelled as normal: the router's preference
    plus chance. A capacity factor bounds them.
    """
    ffn, ranks = find_experts_section(config.model), config.parallel.ep
    if ranks == 1 or not isinstance(ffn, MoEConfig) or ffn.router.name == "expert_choice":
        return 1.0
    per_rank = ffn.n_experts / ranks
    largest = NormalDist().inv_cdf(0.5 ** (1 / MEASURED_EXPERTS))
    violation = MAX_VIOLATION.get(ffn.router.name, AUX_LOSS_MAX_VIOLATION)
    preference = (violation / largest) ** 2 / per_rank
    chance = (ranks - 1) / (tokens * ffn.top_k)
    share = 1 + math.sqrt(preference + chance) * NormalDist().inv_cdf(quantile ** (1 / ranks))
    return max(1.0, min(share, ffn.capacity_factor or math.inf))


@dataclass(frozen=True)
class FailureCost:
    """Cost of failures. mtbf: mean seconds between two; stall: seconds for which training waits for a save;
    best_every: steps between saves that lose least; effective_share: of the time that makes progress then."""

    mtbf: float
    stall: float
    best_every: int
    effective_share: float


def estimate_failures(estimate: "Estimate") -> FailureCost:
    """Estimate how often a run fails, and the checkpoint interval that loses least."""
    config, cluster = estimate.config, estimate.cluster
    step = estimate.time.step - estimate.time.checkpoint
    mtbf = GPU_MTBF_YEARS * 365.25 * 86400 / cluster.gpus
    save = estimate_checkpoint_time(config, cluster, estimate.memory)
    interval = max(math.sqrt(2 * save.stall * mtbf), save.write, step)
    every = max(1, round(interval / step))
    share = estimate_effective_share(every * step, save.stall, mtbf, RESTART_SECONDS)
    return FailureCost(mtbf, save.stall, every, share)


def estimate_effective_share(interval: float, stall: float, mtbf: float, restart: float) -> float:
    """Estimate the share of the time that makes progress. Seconds; interval: of training between saves."""
    saving = interval / (interval + stall)
    lost = (interval / 2 + restart) / mtbf
    return saving / (1 + lost)


def describe_failures(estimate: "Estimate") -> str:
    """Return a line on failures, the config's checkpoint interval and the best one."""
    cost, every = estimate_failures(estimate), estimate.config.checkpoint.every
    step = estimate.time.step - estimate.time.checkpoint
    share = estimate_effective_share(every * step, cost.stall, cost.mtbf, RESTART_SECONDS)
    hours = cost.mtbf / 3600
    frequency = f"every {hours:,.1f} hours" if hours < 72 else f"every {hours / 24:,.0f} days"
    days = step * estimate.config.train.steps / 86400 / cost.effective_share
    best = f"with {cost.best_every}, the best, {100 * cost.effective_share:.1f} %: {days:.3g} days"
    return (
        f"a failure {frequency} (at one in 50,000 GPU hours): with checkpoint.every={every}, {100 * share:.1f} % "
        f"of the time is progress; {best}"
    )
