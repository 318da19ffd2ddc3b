"""Learning rates over a run, as factors on the optimizer's rate."""

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
"""Each takes its config section, the step after warm-up (counted from 1 at the run's start) and the run's steps."""


@SCHEDULES.register("constant")
def constant(config: ConstantSchedule, step: int, steps: int) -> float:
    """1 throughout."""
    return 1.0


@SCHEDULES.register("linear")
def linear(config: LinearSchedule, step: int, steps: int) -> float:
    """Straight from 1 to `min_lr_factor`."""
    return 1.0 + (config.min_lr_factor - 1.0) * _progress(config, step, steps)


@SCHEDULES.register("cosine")
def cosine(config: CosineSchedule, step: int, steps: int) -> float:
    """Half a cosine from 1 to `min_lr_factor` (Loshchilov & Hutter 2017, equation 5, without restarts)."""
    fall = 0.5 * (1.0 + math.cos(math.pi * _progress(config, step, steps)))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * fall


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(config: InverseSqrtSchedule, step: int, steps: int) -> float:
    """√(w / step) after w steps of warm-up: with lr = (d·w)^-½ the rate of Vaswani et al. 2017, equation 3."""
    return math.sqrt(config.warmup_steps / step)


@SCHEDULES.register("wsd")
def wsd(config: WSDSchedule, step: int, steps: int) -> float:
    """1, and over the run's last `decay_ratio` down to `min_lr_factor` (Hu et al. 2024; Hägele et al. 2024)."""
    falling = max(1, round(config.decay_ratio * steps))
    part = (step - (steps - falling)) / falling
    if part <= 0:
        return 1.0
    fall = part if config.decay_type == "linear" else math.sqrt(part)
    return 1.0 + (config.min_lr_factor - 1.0) * fall


def schedule_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor for optimizer step `step` of `steps`, counted from 1: a linear warm-up, then the schedule.

    The last step of warm-up has factor 1, the last step of the run the schedule's final value.
    """
    # Looked up first: a wrong name shall not wait for the warm-up's end.
    schedule = SCHEDULES.get(config.name)
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    return schedule(config, step, steps)


def _progress(config: ScheduleSection, step: int, steps: int) -> float:
    """0 at the first step after warm-up, 1 at the last of the run."""
    return (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps - 1)
