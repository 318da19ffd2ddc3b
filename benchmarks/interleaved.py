"""Two sides that take steps by turns: the ratios of their seconds, round by round. What other work takes of the machine
meets both alike, so the ratios mean something where the seconds do not."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""The CPU's is over all threads, and says more on a machine that others use."""
FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Instructions by which products are made, the best first."""

Step = Callable[[], object]
Side = Callable[[], dict[str, float]]
"""Takes a step, and gives its seconds by each of the clocks."""


def timed(step: Step) -> Side:
    """A step in this process."""

    def side() -> dict[str, float]:
        start = {name: clock() for name, clock in CLOCKS.items()}
        step()
        return {name: clock() - start[name] for name, clock in CLOCKS.items()}

    return side


def compare(ours: Side, theirs: Side, rounds: int) -> dict[str, list[float]]:
    """Their seconds over ours by each clock, round by round, after two steps to warm up; who goes first alternates."""
    sides = {"ours": ours, "theirs": theirs}
    for side in sides.values():
        side(), side()
    ratios: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    for number in range(rounds):
        order = list(sides) if number % 2 else list(sides)[::-1]
        taken = {name: sides[name]() for name in order}
        for clock, values in ratios.items():
            values.append(taken["theirs"][clock] / taken["ours"][clock])
    return ratios


def summary(ratios: dict[str, list[float]]) -> dict[str, float]:
    """By each clock the median, the lowest and the highest."""
    found = {}
    for clock, values in ratios.items():
        found |= {
            clock: statistics.median(values),
            f"{clock}_lowest": min(values),
            f"{clock}_highest": max(values),
        }
    return found


def cpu() -> str:
    """What the machine calls its CPU, and the best instructions for products that it has."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.is_file() else []
    facts = dict(reversed([[word.strip() for word in line.split(":", 1)] for line in lines if ":" in line]))
    flags = facts.get("flags", "").split()
    best = next((feature for feature in FEATURES if feature in flags), "")
    return " ".join(
        filter(None, [facts.get("model name", platform.processor()), f"({best})" if best else ""])
    )
