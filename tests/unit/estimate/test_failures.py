"""Failures: the best interval of checkpoints against a brute force, and a simulated run."""

import random

import pytest

from megatfm.estimate.failures import effective_share


def simulated(interval: float, stall: float, between: float, restart: float, seed: int) -> float:
    """Share of the time that makes progress in a run whose failures come at random."""
    draw, clock, done = random.Random(seed), 0.0, 0.0
    next_failure = draw.expovariate(1 / between)
    while clock < 4000 * between / 10:
        if clock + interval + stall <= next_failure:
            clock, done = clock + interval + stall, done + interval
        else:
            clock = next_failure + restart
            next_failure = clock + draw.expovariate(1 / between)
    return done / clock


@pytest.mark.parametrize(
    ("interval", "stall", "between", "restart"), [(600, 30, 20000, 300), (2000, 5, 30000, 900)]
)
def test_the_share_is_that_of_a_simulated_run(
    interval: float, stall: float, between: float, restart: float
) -> None:
    shares = [simulated(interval, stall, between, restart, seed) for seed in range(8)]
    assert effective_share(interval, stall, between, restart) == pytest.approx(sum(shares) / 8, rel=0.01)


def test_youngs_interval_is_nearly_the_best() -> None:
    stall, between = 12.0, 40000.0
    best = max(effective_share(interval, stall, between, 300) for interval in range(60, 8000, 20))
    young = (2 * stall * between) ** 0.5
    assert effective_share(young, stall, between, 300) > best - 2e-4
    assert effective_share(young / 4, stall, between, 300) < best - 5e-3
