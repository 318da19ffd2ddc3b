"""Failures: how often a run of many GPUs stops, how often to save, and how much of the time is left.

A run stops at the rate of its GPUs together. Each stop loses the time since the last checkpoint, half an interval on
average, and that of a restart. The best interval is √(2 · save · time between failures) (Young 1974).
"""

import math
from dataclasses import dataclass

from megatfm.estimate.estimator import Estimate

GPU_YEARS = 50_000 / 24 / 365.25
"""Mean time between failures of one GPU with its share of a node: Llama 3 met 419 unexpected stops in 54 days on
16,384 GPUs (Grattafiori et al. 2024, section 3.3.4), one in 50,700 GPU hours."""
RESTART_SECONDS = 600.0
"""From a failure to the next step: noticing it, starting processes, loading (assumed)."""
COPY_BANDWIDTH = 20e9
"""Bytes a second of a GPU's state to host memory, for which a background save stops the run (PCIe 4 and 5)."""


@dataclass(frozen=True)
class Failures:
    """What failures cost. between: mean seconds between two; save: seconds of a save on disk; stall: for which training
    stops for it; steps: of the best interval; effective: share of the time that makes progress."""

    between: float
    save: float
    stall: float
    steps: int
    effective: float


def failures(estimate: Estimate, gpu_years: float = GPU_YEARS, restart: float = RESTART_SECONDS) -> Failures:
    """Estimate them. gpu_years: mean time between failures of one GPU."""
    cluster, step = estimate.cluster, estimate.time.step
    between = gpu_years * 365.25 * 86400 / cluster.gpus
    state = max(rank.weights + rank.optimizer for rank in estimate.memory)
    on_node = state * min(cluster.gpus, cluster.node.gpus)
    save = on_node / cluster.node.disk_bandwidth
    is_async = estimate.config.checkpoint.mode == "async"
    stall = state / COPY_BANDWIDTH if is_async else save
    interval = max(math.sqrt(2 * stall * between), save if is_async else stall, step)
    steps = max(1, round(interval / step))
    return Failures(between, save, stall, steps, effective_share(steps * step, stall, between, restart))


def effective_share(interval: float, stall: float, between: float, restart: float) -> float:
    """Share of the time that makes progress, with saves every `interval` seconds of training."""
    saving = interval / (interval + stall)
    lost = (interval / 2 + restart) / between
    return saving / (1 + lost)


def failure_line(estimate: Estimate) -> str:
    """What to expect, in a line."""
    found, every = failures(estimate), estimate.config.checkpoint.every
    now = effective_share(every * estimate.time.step, found.stall, found.between, RESTART_SECONDS)
    hours = found.between / 3600
    often = f"every {hours:,.1f} hours" if hours < 72 else f"every {hours / 24:,.0f} days"
    best = f"checkpoint.every={found.steps} {100 * found.effective:.1f} %: {estimate.days / found.effective:.3g} days"
    return (
        f"a failure {often} (at one in 50,000 GPU hours): checkpoint.every={every} leaves {100 * now:.1f} % of the "
        f"time, {best}"
    )
