"""Failures: how often a run of many GPUs stops, how often to save, and how much of the time is left.

A run stops at the rate of its GPUs together. Each stop loses the time since the last checkpoint, half an interval on
average, and that of a restart. The best interval is √(2 · save · time between failures) (Young 1974).
"""

import math
from dataclasses import dataclass

from megatfm.estimate.estimator import Estimate
from megatfm.estimate.stalls import checkpoint_time

GPU_YEARS = 50_000 / 24 / 365.25
"""Mean time between failures of one GPU with its share of a node: Llama 3 met 419 unexpected stops in 54 days on
16,384 GPUs (Grattafiori et al. 2024, section 3.3.4), one in 50,700 GPU hours."""
RESTART_SECONDS = 600.0
"""From a failure to the next step: noticing it, starting processes, loading (assumed)."""


@dataclass(frozen=True)
class Failures:
    """Cost of failures. between: mean seconds between two; save: seconds of a save on disk; stall: for which training
    stops for it; steps: of the best interval; effective: share of the time that makes progress."""

    between: float
    save: float
    stall: float
    steps: int
    effective: float


def failures(estimate: Estimate, gpu_years: float = GPU_YEARS, restart: float = RESTART_SECONDS) -> Failures:
    """Estimate them. gpu_years: mean time between failures of one GPU."""
    config, cluster = estimate.config, estimate.cluster
    step = estimate.time.step - estimate.time.checkpoint
    between = gpu_years * 365.25 * 86400 / cluster.gpus
    save = checkpoint_time(config, cluster, estimate.memory)
    interval = max(math.sqrt(2 * save.stall * between), save.write, step)
    steps = max(1, round(interval / step))
    effective = effective_share(steps * step, save.stall, between, restart)
    return Failures(between, save.write, save.stall, steps, effective)


def effective_share(interval: float, stall: float, between: float, restart: float) -> float:
    """Share of the time that makes progress, with saves every `interval` seconds of training."""
    saving = interval / (interval + stall)
    lost = (interval / 2 + restart) / between
    return saving / (1 + lost)


def failure_line(estimate: Estimate) -> str:
    """Return the expectation in a line."""
    expected, every = failures(estimate), estimate.config.checkpoint.every
    step = estimate.time.step - estimate.time.checkpoint
    now = effective_share(every * step, expected.stall, expected.between, RESTART_SECONDS)
    hours = expected.between / 3600
    often = f"every {hours:,.1f} hours" if hours < 72 else f"every {hours / 24:,.0f} days"
    days = step * estimate.config.train.steps / 86400 / expected.effective
    best = f"checkpoint.every={expected.steps} {100 * expected.effective:.1f} %: {days:.3g} days"
    return (
        f"a failure {often} (at one in 50,000 GPU hours): checkpoint.every={every} leaves {100 * now:.1f} % of the "
        f"time, {best}"
    )
