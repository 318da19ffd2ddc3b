"""Learning rates over a run, as factors on the optimizer's rate."""

import math
from collections.abc import Callable

from megatfm.config import ScheduleConfig
from megatfm.registry import Registry

SCHEDULES: Registry[Callable[[float, float], float]] = Registry("schedule")
"""Each takes the progress after warm-up in [0, 1] and the final ratio; gives a factor."""


@SCHEDULES.register("constant")
def constant(progress: float, final_ratio: float) -> float:
    """1 throughout."""
    return 1.0


@SCHEDULES.register("linear")
def linear(progress: float, final_ratio: float) -> float:
    """Straight from 1 to `final_ratio`."""
    return 1.0 + (final_ratio - 1.0) * progress


@SCHEDULES.register("cosine")
def cosine(progress: float, final_ratio: float) -> float:
    """Half a cosine from 1 to `final_ratio` (Loshchilov & Hutter 2017, equation 5, without restarts)."""
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor for optimizer step `step` of `steps`, counted from 1: a linear warm-up, then the schedule.

    The first step after warm-up has factor 1, the last step the schedule's final value.
    """
    schedule = SCHEDULES.get(
        config.name
    )  # looked up first: a wrong name shall not wait for the warm-up's end
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps - 1)
    return schedule(progress, config.final_ratio)
