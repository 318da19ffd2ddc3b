"""Stalls of a step that are no computing: checkpoints, data that comes late, and experts that get more than others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from megatfm.config import Config
from megatfm.config.ffn import MoEConfig
from megatfm.estimate.devices import Cluster
from megatfm.estimate.memory import RankMemory
from megatfm.estimate.weights import experts_section
from megatfm.objectives import reads_text

COPY_BANDWIDTH = 20e9
"""Bytes a second of a GPU's state to host memory, for which a background save stops the run (PCIe 4 and 5)."""
TOKENS_PER_SECOND = 36.7e6
"""Tokens that one core reads and packs (benchmarks/results/2026-11-22-data.md)."""
SECONDS_PER_IMAGE = 1.52e-3
"""Time of one core for an image of 500 × 375, from the shard to the row (2026-11-24-vision-loader.md)."""
QUANTILE = 0.9
"""Share of the steps in which no rank has more tokens than is counted for experts."""
MAX_VIOLATION = {"deepseek_v3": 0.04, "hash": 0.0, "expert_choice": 0.0}
"""Most tokens of an expert over the mean, less 1, by router (Wang et al. 2024, arXiv 2408.15664, table 2: "MaxVio" of
their 1B model by biases; a hash and a choice by experts are even but for chance)."""
MAX_VIOLATION_BY_LOSS = 0.72
"""The same with an auxiliary loss, which all other routers have."""
MEASURED_EXPERTS = 64
"""Experts of the models in that table."""


@dataclass(frozen=True)
class CheckpointTime:
    """Seconds of one save. write: until it is on the disk; stall: for which training stops."""

    write: float
    stall: float


def checkpoint_time(config: Config, cluster: Cluster, memory: Sequence[RankMemory]) -> CheckpointTime:
    """Time of a save of weights and optimizer, by all of a node's ranks over its link to the disk."""
    state = max(rank.weights + rank.optimizer for rank in memory)
    write = state * min(cluster.gpus, cluster.node.gpus) / cluster.node.disk_bandwidth
    return CheckpointTime(write, state / COPY_BANDWIDTH if config.checkpoint.mode == "async" else write)


def checkpoint_stall(config: Config, cluster: Cluster, memory: Sequence[RankMemory], step: float) -> float:
    """Seconds of a step that go to checkpoints, on average. step: seconds of one without.

    A save in the background that takes longer than the steps between two is waited for by the next one.
    """
    save, every = checkpoint_time(config, cluster, memory), config.checkpoint.every
    late = save.write - every * step if config.checkpoint.mode == "async" else 0.0
    return (save.stall + max(0.0, late)) / every


def data_seconds(config: Config) -> float:
    """Time in which a rank's loader makes the rows of a step, with `data.workers` processes or one thread."""
    parallel, data = config.parallel, config.data
    rows = config.train.global_batch / (parallel.dp_shard * parallel.dp_replicate)
    if not reads_text(config.objective.name):
        return rows * SECONDS_PER_IMAGE / max(1, data.workers)
    tokens = data.sequence_length + (data.target_length or 0)
    return rows * tokens / TOKENS_PER_SECOND / max(1, data.workers)


def data_stall(config: Config, step: float) -> float:
    """Seconds of a step in which the device waits for rows, which are made while it computes the last ones."""
    return max(0.0, data_seconds(config) - step)


def fullest_share(config: Config, tokens: float, quantile: float = QUANTILE) -> float:
    """Load of the expert-parallel rank that has most, over the mean: what is exceeded in 1 − quantile of the steps.

    tokens: of one micro-batch, of all ranks that share experts. Loads are taken as normal: a router's own preferences,
    and chance. Experts with a capacity get no more than that.
    """
    ffn, ranks = experts_section(config.model), config.parallel.ep
    if ranks == 1 or not isinstance(ffn, MoEConfig) or ffn.router.name == "expert_choice":
        return 1.0
    per_rank = ffn.n_experts / ranks
    largest = NormalDist().inv_cdf(0.5 ** (1 / MEASURED_EXPERTS))
    violation = MAX_VIOLATION.get(ffn.router.name, MAX_VIOLATION_BY_LOSS)
    preference = (violation / largest) ** 2 / per_rank
    chance = (ranks - 1) / (tokens * ffn.top_k)
    share = 1 + math.sqrt(preference + chance) * NormalDist().inv_cdf(quantile ** (1 / ranks))
    return max(1.0, min(share, ffn.capacity_factor or math.inf))
