"""Measures seconds of functions, and of each operator within them, on a machine whose speed changes.

Neighbours on a shared machine slow all work by up to 1.6 times, in spells of seconds. So measurements take turns, each
time in another order, and each is compared with those that were made in the same half second.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.estimate.operators import COLLECTIVES
from megatfm.ops.torch_private import KERNEL_FREE

ROUNDS, MIN_ROUNDS = 24, 8
MAX_SECONDS = 240.0
"""Time after which no round begins, beyond the least number of them."""
MIN_SECONDS = 2e-3
"""Shortest measurement of a function that is repeated."""
SHORTEST_KERNEL = {"cpu": 0.0, "cuda": 3e-6}
"""Seconds of the shortest kernel, by which launching is told from computing (assumed)."""
SPELL_SECONDS = 0.5
"""Time in which the machine's speed counts as constant."""
FITS = 10
"""Times that spells and measurements are fitted to one another."""

Measurement = Callable[[], Sequence[float]]
"""Function that runs something and returns the seconds of its parts: always as many, in the same order."""


class Clock:
    """Stopwatch of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        one = torch.ones(1, device=device)
        cost = min(self._time(partial(one.add_, 1.0) if device.type == "cuda" else float) for _ in range(100))
        self._cost = max(0.0, cost - SHORTEST_KERNEL[device.type])

    def read_seconds(self) -> float:
        """Return the device's time in seconds: on a CPU that of this process's threads."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()

    def time_call(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one call, without those of reading the time."""
        return max(1e-9, self._time(function, repeats) - self._cost) / repeats

    def _time(self, function: Callable[[], object], repeats: int = 1) -> float:
        start = self.read_seconds()
        for _ in range(repeats):
            function()
        return self.read_seconds() - start

    def make_measurement(self, function: Callable[[], object], min_seconds: float = MIN_SECONDS) -> Measurement:
        """Return a measurement of a function, which runs twice to warm up.

        min_seconds: of a measurement, in which shorter calls are repeated.
        """
        function()
        repeats = max(1, round(min_seconds / self.time_call(function)))
        return lambda: [self.time_call(function, repeats)]

    def make_cold_measurement(self, function: Callable[[], object]) -> Measurement:
        """Return a measurement of a function that a CPU runs once: inputs are in no near cache, as in a step."""
        return self.make_measurement(function, 0.0 if self.device.type == "cpu" else MIN_SECONDS)

    def measure(self, functions: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
        """Return the seconds of one call of each function, measured in turns."""
        return [seconds for (seconds,) in measure_in_turns(list(map(self.make_cold_measurement, functions)), rounds)]


def measure_in_turns(
    measurements: Sequence[Measurement], rounds: int = ROUNDS, read_time: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Return the seconds of the parts of each measurement, at the machine's median speed over all rounds.

    rounds: fewer, but `MIN_ROUNDS`, if they take more than `MAX_SECONDS`; read_time: in seconds, by which spells end.
    """
    draw = random.Random(0)
    tables: list[list[Sequence[float]]] = [[] for _ in measurements]
    spells: list[list[int]] = [[] for _ in measurements]
    spell, start = 0, (begin := read_time())
    for number in range(rounds):
        if number >= MIN_ROUNDS and read_time() - begin > MAX_SECONDS:
            break
        for index in draw.sample(range(len(measurements)), len(measurements)):
            seconds = measurements[index]()
            tables[index].append(seconds)
            spells[index].append(spell)
            if (now := read_time()) - start >= SPELL_SECONDS:
                spell, start = spell + 1, now
    numbers = [len(table[0]) for table in tables]
    spells_of_parts = np.repeat(np.array(spells).T, numbers, axis=1)
    fitted = fit_seconds(np.concatenate([np.array(table) for table in tables], axis=1), spells_of_parts)
    return [part.tolist() for part in np.split(fitted, np.cumsum(numbers)[:-1])]


def fit_seconds(measured: np.ndarray[Any, Any], spells: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the seconds of parts, each measured as a product of its own seconds and of a spell's slowness.

    measured, spells: [rounds, parts]. Medians in turns (Tukey's median polish, of logarithms); long parts count more
    in a spell's slowness, whose median is 1.
    """
    logs, slowness = np.log(measured), np.zeros(spells.max() + 1)
    order = np.argsort(spells, axis=None, kind="stable")
    ends = np.cumsum(np.bincount(spells.ravel()))[:-1]
    parts_of_spells = np.split(order % logs.shape[1], ends)
    for _ in range(FITS):
        seconds = np.median(logs - slowness[spells], axis=0)
        residuals = np.split((logs - seconds).ravel()[order], ends)
        weights = np.exp(seconds)
        slowness = np.array(
            [_weighted_median(values, weights[parts]) for values, parts in zip(residuals, parts_of_spells, strict=True)]
        )
        slowness -= np.median(slowness)
    return np.exp(np.median(logs - slowness[spells], axis=0))


def _weighted_median(values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(sums, sums[-1] / 2)]])


class OperatorTimer(TorchDispatchMode):
    """Measures each operator that launches a kernel where it runs. seconds: of the operators, in order."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.seconds: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not launches_kernel(func):
            return func(*args, **(kwargs or {}))
        output: Any = None

        def run() -> None:
            nonlocal output
            output = func(*args, **(kwargs or {}))

        self.seconds.append(self._clock.time_call(run))
        return output


def launches_kernel(function: Any) -> bool:
    """Tell whether one of torch's operators computes on the device."""
    namespace, _, name = function._schema.name.partition("::")
    return namespace not in ("prim", "profiler", *COLLECTIVES) and name not in KERNEL_FREE
