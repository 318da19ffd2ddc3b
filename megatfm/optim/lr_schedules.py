"""Learning rate schedules: factors on the optimizer's learning rate over a run."""

import math
from collections.abc import Callable
from typing import Any

from megatfm.config import (
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    ScheduleConfig,
    ScheduleSection,
    WSDSchedule,
)
from megatfm.registry import Registry

SCHEDULES: Registry[Callable[[Any, int, int], float]] = Registry("schedule")
"""Schedules by name: (config section, step after warm-up, steps of the run) → factor. Steps count from 1."""


@SCHEDULES.register("constant")
def constant(config: ConstantSchedule, step: int, steps: int) -> float:
    """Return 1."""
    return 1.0


@SCHEDULES.register("linear")
def linear(config: LinearSchedule, step: int, steps: int) -> float:
    """Decay linearly from 1 to `min_lr_factor`."""
    return 1.0 + (config.min_lr_factor - 1.0) * _compute_progress(config, step, steps)


@SCHEDULES.register("cosine")
def cosine(config: CosineSchedule, step: int, steps: int) -> float:
    """Decay by half a cosine from 1 to `min_lr_factor` (Loshchilov & Hutter 2017, equation 5, without restarts)."""
    fall = 0.5 * (1.0 + math.cos(math.pi * _compute_progress(config, step, steps)))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * fall


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(config: InverseSqrtSchedule, step: int, steps: int) -> float:
    """Return √(w / step) after w warm-up steps; with lr = (d·w)^-½ this is Vaswani et al. 2017, equation 3."""
    return math.sqrt(config.warmup_steps / step)


@SCHEDULES.register("wsd")
def wsd(config: WSDSchedule, step: int, steps: int) -> float:
    """Stay at 1, then decay to `min_lr_factor` over the last `decay_ratio` of the run.

    Hu et al. 2024 (MiniCPM); Hägele et al. 2024.
    """
    decay_steps = max(1, round(config.decay_ratio * steps))
    progress = (step - (steps - decay_steps)) / decay_steps
    if progress <= 0:
        return 1.0
    fall = progress if config.decay_type == "linear" else math.sqrt(progress)
    return 1.0 + (config.min_lr_factor - 1.0) * fall


def compute_schedule_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor at optimizer step `step` of `steps`, counted from 1: linear warm-up, then the schedule.

    The last warm-up step has factor 1, the last step of the run the schedule's final value.
    """
    # Look it up first, so that a wrong name fails before the warm-up ends.
    schedule = SCHEDULES.get(config.name)
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    return schedule(config, step, steps)


def check_schedule(config: ScheduleConfig, steps: int) -> None:
    """Compute the factor all over a run, so that a schedule reads its keys, and fails, before the first step."""
    for step in {*range(1, steps + 1, max(1, steps // 1000)), steps}:
        compute_schedule_factor(config, step, steps)


def _compute_progress(config: ScheduleSection, step: int, steps: int) -> float:
    """Return the progress from 0 at the first step after warm-up to 1 at the last step of the run."""
    return (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps - 1)
