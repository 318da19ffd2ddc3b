"""Seconds on a machine whose speed changes: in turns, compared with what was measured in the same spell."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from megatfm.estimate import clock
from megatfm.estimate.clock import Clock, OperatorTimer, fit_seconds, measure_in_turns


class Machine:
    """A clock that calls move forward, each by its seconds times the slowness of the moment."""

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.now, self.order, self._slowness = 0.0, list[int](), slowness

    def make_measurement(self, number: int, seconds: Sequence[float]) -> Callable[[], list[float]]:
        def measure() -> list[float]:
            self.order.append(number)
            slowness = self._slowness(self.now)
            self.now += slowness * sum(seconds)
            return [slowness * t for t in seconds]

        return measure


SECONDS = ([0.2], [0.02, 1e-5, 0.07], [3e-4], [0.1], [0.05, 0.004])


def measure_on(slowness: Callable[[float], float], rounds: int = 15) -> tuple[Machine, list[list[float]]]:
    machine = Machine(slowness)
    measurements = [machine.make_measurement(number, seconds) for number, seconds in enumerate(SECONDS)]
    return machine, measure_in_turns(measurements, rounds, lambda: machine.now)


def test_neighbours_that_come_and_go_change_no_ratio() -> None:
    """Every other 2 seconds all takes 1.6 times as long: a median alone would be that of the one or the other."""
    _, measured = measure_on(lambda now: 1.0 if now % 4 > 2 else 1.6)
    ratios = np.concatenate(measured) / np.concatenate(SECONDS)
    assert ratios.max() / ratios.min() == pytest.approx(1.0, abs=0.03)


def test_on_a_steady_machine_the_seconds_are_exact() -> None:
    _, measured = measure_on(lambda now: 1.0)
    for part, true in zip(measured, SECONDS, strict=True):
        assert part == pytest.approx(true)


def test_each_round_has_each_measurement_in_another_order() -> None:
    machine, _ = measure_on(lambda now: 1.0, rounds=4)
    rounds = [tuple(machine.order[start : start + 5]) for start in range(0, 20, 5)]
    assert [sorted(order) for order in rounds] == [[0, 1, 2, 3, 4]] * 4
    assert len(set(rounds)) > 1


@pytest.mark.parametrize(("round_seconds", "rounds"), [(2.0, 24), (20.0, 13), (30.0, 9), (500.0, 8)])
def test_slow_machines_measure_fewer_rounds(round_seconds: float, rounds: int) -> None:
    """No round begins after 240 seconds, but eight do in any case."""
    machine = Machine(lambda now: round_seconds)
    measure_in_turns([machine.make_measurement(0, [0.7]), machine.make_measurement(1, [0.3])], 24, lambda: machine.now)
    assert len(machine.order) == 2 * rounds


def test_single_disturbed_measurements_do_not_count() -> None:
    true = np.array([0.3, 0.01, 0.02, 0.2])
    measured = np.tile(true, (7, 1))
    measured[2, 1] *= 50
    measured[5, 3] *= 9
    spells = np.arange(7)[:, None].repeat(4, axis=1)
    assert fit_seconds(measured, spells) == pytest.approx(true)


def test_long_parts_tell_a_spell_from_noise() -> None:
    """Many short parts, slower by chance in one spell, do not make that spell slow."""
    true = np.array([1.0, *[1e-4] * 9])
    measured = np.tile(true, (5, 1))
    measured[3, 1:] *= 1.5
    measured[:, 0] *= [1.0, 1.1, 0.9, 1.0, 1.2]
    measured[:, 1:] *= np.array([1.0, 1.1, 0.9, 1.0, 1.2])[:, None]
    spells = np.arange(5)[:, None].repeat(10, axis=1)
    assert fit_seconds(measured, spells) == pytest.approx(true)


def test_operators_that_launch_kernels_are_timed_where_they_run() -> None:
    """A product and an addition; views and memory that nothing writes are none."""
    x, weight = torch.randn(4, 6), torch.randn(6, 6, requires_grad=True)
    timer = OperatorTimer(Clock(torch.device("cpu")))
    with timer:
        y = (x @ weight).view(24).detach()
        y += 1
        torch.empty(3)
    assert len(timer.seconds) == 2
    assert all(0 < seconds < 1 for seconds in timer.seconds)


def test_reading_the_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def read_seconds(_: Clock) -> float:
        nonlocal now
        now += 0.25
        return now

    monkeypatch.setattr(clock.Clock, "read_seconds", read_seconds)
    stopwatch = Clock(torch.device("cpu"))

    def work() -> None:
        nonlocal now
        now += 2.0

    assert stopwatch.time_call(work) == pytest.approx(2.0)
    assert stopwatch.time_call(work, repeats=3) == pytest.approx(2.0)


def test_short_functions_are_repeated_unless_they_are_measured_cold() -> None:
    calls, stopwatch = [], Clock(torch.device("cpu"))
    warm = stopwatch.make_measurement(lambda: calls.append(1), min_seconds=1e-3)
    calls.clear()
    assert len(warm()) == 1
    assert len(calls) > 10
    cold = stopwatch.make_cold_measurement(lambda: calls.append(1))
    calls.clear()
    cold()
    assert len(calls) == 1
