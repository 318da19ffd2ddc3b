"""Learning rates at the edges of a run, and against torch's schedulers."""

import math
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from megatfm.config import ScheduleConfig
from megatfm.errors import UsageError
from megatfm.train.schedules import SCHEDULES, factor


def factors(steps: int, **config: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(config)
    return [factor(schedule, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_edges(name: str, warmup: int) -> None:
    rates = factors(20, name=name, warmup_steps=warmup, final_ratio=0.1)
    if warmup:
        assert rates[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    assert rates[warmup] == 1.0, "the first step after warm-up"
    assert rates[-1] == pytest.approx(0.1)
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_a_warm_up_as_long_as_the_run_and_runs_of_a_step(name: str) -> None:
    assert factors(4, name=name, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert factors(1, name=name) == [1.0]
    assert factors(1, name=name, warmup_steps=1) == [1.0]
    assert factors(2, name=name, warmup_steps=1) == [1.0, 1.0]


def test_a_constant_rate() -> None:
    assert factors(5, name="constant", warmup_steps=2, final_ratio=0.1) == [0.5, 1.0, 1.0, 1.0, 1.0]


def with_torch(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_against_torch() -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1.0)

    steps, warmup, final = 30, 6, 0.2
    sgd = optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its own parts in a deprecated way
        rise = LambdaLR(sgd, lambda step: (step + 1) / warmup)
        fall = CosineAnnealingLR(sgd, T_max=steps - warmup - 1, eta_min=final)
        cosine = with_torch(sgd, SequentialLR(sgd, [rise, fall], [warmup]), steps)
    assert factors(steps, name="cosine", warmup_steps=warmup, final_ratio=final) == pytest.approx(cosine)
    sgd = optimizer()
    linear = with_torch(sgd, LinearLR(sgd, 1.0, final, total_iters=steps - 1), steps)
    assert factors(steps, name="linear", final_ratio=final) == pytest.approx(linear)


def test_the_cosine_in_closed_form() -> None:
    for progress in (0.0, 0.25, 0.5, 1.0):
        wanted = 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        assert SCHEDULES.get("cosine")(progress, 0.1) == pytest.approx(wanted)


def test_an_unknown_schedule_does_not_wait_for_the_end_of_warm_up() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule 'cosin' \(did you mean 'cosine'\?\)"):
        factor(ScheduleConfig(name="cosin", warmup_steps=5), 1, 10)
