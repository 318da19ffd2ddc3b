"""Learning rate schedules against torch's schedulers and closed forms."""

import math
import warnings
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from megatfm.config import PluginSchedule, ScheduleConfig
from megatfm.errors import UsageError
from megatfm.optim.lr_schedules import compute_schedule_factor

SECTION: TypeAdapter[Any] = TypeAdapter(ScheduleConfig)


def compute_factors(steps: int, **config: object) -> list[float]:
    schedule = SECTION.validate_python(config)
    return [compute_schedule_factor(schedule, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_reach_their_first_and_last_rate(name: str, warmup: int) -> None:
    rates = compute_factors(20, name=name, warmup_steps=warmup, min_lr_factor=0.1)
    if warmup:
        assert rates[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    assert rates[warmup] == 1.0, "the first step after warm-up"
    assert rates[-1] == pytest.approx(0.1)
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_warm_up_may_last_the_run_and_a_run_may_be_one_step(name: str) -> None:
    assert compute_factors(4, name=name, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert compute_factors(1, name=name, warmup_steps=1) == [1.0]
    if name != "inverse_sqrt":
        assert compute_factors(1, name=name) == [1.0]
        assert compute_factors(2, name=name, warmup_steps=1) == [1.0, 1.0]


def record_torch_rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_schedules_equal_those_of_torch() -> None:
    def make_optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1.0)

    steps, warmup, final = 30, 6, 0.2
    sgd = make_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its own parts in a deprecated way
        rise = LambdaLR(sgd, lambda step: (step + 1) / warmup)
        fall = CosineAnnealingLR(sgd, T_max=steps - warmup - 1, eta_min=final)
        cosine = record_torch_rates(sgd, SequentialLR(sgd, [rise, fall], [warmup]), steps)
    assert compute_factors(steps, name="cosine", warmup_steps=warmup, min_lr_factor=final) == pytest.approx(cosine)
    sgd = make_optimizer()
    linear = record_torch_rates(sgd, LinearLR(sgd, 1.0, final, total_iters=steps - 1), steps)
    assert compute_factors(steps, name="linear", min_lr_factor=final) == pytest.approx(linear)


def test_schedules_equal_their_closed_forms() -> None:
    assert compute_factors(5, name="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    cosine, line = (compute_factors(5, name=name, min_lr_factor=0.1) for name in ("cosine", "linear"))
    assert cosine == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(5)])
    assert line == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])


def test_inverse_sqrt_equals_the_formula_of_the_transformer() -> None:
    """d^-½ · min(s^-½, s · w^-1.5), with lr = (d·w)^-½ for d = 512."""
    warmup, width = 40, 512
    lr = (width * warmup) ** -0.5
    expected = [width**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, 201)]
    rates = [lr * rate for rate in compute_factors(200, name="inverse_sqrt", warmup_steps=warmup)]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_wsd_equals_its_closed_form(shape: str, final: float) -> None:
    rates = compute_factors(50, name="wsd", warmup_steps=5, decay_ratio=0.2, decay_type=shape, min_lr_factor=final)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:40] == [1.0] * 35
    progress = [(i + 1) / 10 for i in range(10)]
    fall = [1 - t if shape == "linear" else 1 - t**0.5 for t in progress]
    assert rates[40:] == pytest.approx([final + (1 - final) * f for f in fall], abs=1e-12)


def test_a_longer_wsd_run_shares_the_stable_part() -> None:
    short, long = (compute_factors(steps, name="wsd", warmup_steps=5) for steps in (50, 100))
    assert short[:40] == long[:40]
    assert long[79] == 1.0 > long[80]


def test_an_unknown_schedule_is_refused_in_the_first_step() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule 'cosin' \(did you mean 'cosine'\?\)"):
        compute_schedule_factor(PluginSchedule(name="cosin", warmup_steps=5), 1, 10)
