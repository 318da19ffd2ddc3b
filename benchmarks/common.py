"""Arguments, results, machine facts and turns, shared by the scripts of this folder; needs Python alone.

What is timed takes turns, round by round: other work on the machine meets all sides alike, so the ratios within a round
mean something where the seconds do not."""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""The CPU's is over all threads, and says more on a machine that others use."""
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Instructions by which products are made, the best first."""

Item = TypeVar("Item")
Step = Callable[[], object]
Side = Callable[[], dict[str, float]]
"""Takes a step, and gives its seconds by each of the clocks."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring, line by line."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def output_folder(path: str) -> Path:
    """A folder, made when the command is read: an hour's figures are not lost for want of one. A type for argparse."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def output_file(path: str) -> Path:
    """A path whose folder is made when the command is read. A type for argparse."""
    output_folder(str(Path(path).parent))
    return Path(path)


def today() -> str:
    return date.today().isoformat()


def dated(folder: Path | None, name: str) -> Path | None:
    """The path of a result of today: FOLDER/DATE-NAME; None where no folder is given."""
    return folder and folder / f"{today()}-{name}"


def write_text(path: Path | None, text: str) -> None:
    """Write a result, where a path is given."""
    if path:
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def write_json(path: Path | None, value: object, indent: int = 1) -> None:
    """Write a result, where a path is given."""
    write_text(path, json.dumps(value, indent=indent))


class Page:
    """A result in Markdown: lines are printed as they come, and the file is written anew with each row."""

    def __init__(self, path: Path | None, *heading: str) -> None:
        self.path, self.lines = path, list(heading)
        if heading:
            print("\n".join(heading), flush=True)

    def add(self, *lines: str) -> None:
        self.lines += lines
        print("\n".join(lines), flush=True)
        write_text(self.path, "\n".join(self.lines))


def cpu_name(*, instructions: bool = False) -> str:
    """Its name, where Linux says it, else its architecture; with the best instructions for products that it has."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    facts = dict(reversed([[word.strip() for word in line.split(":", 1)] for line in lines if ":" in line]))
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    best = next((f" ({flag})" for flag in INSTRUCTIONS if flag in flags), "")
    return name + best * instructions


def system() -> str:
    """The operating system, and how many cores it has."""
    return f"{platform.platform()}, {os.cpu_count()} cores"


def device_name(device: str) -> str:
    """The name of the GPU that torch uses; "a CPU" elsewhere."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "a CPU"


def read_memory(key: str, file: str = "status") -> int:
    """Bytes of this process by Linux' account: VmRSS now, VmHWM at most; Pss of smaps_rollup: a page that n processes
    map counts as its n-th part."""
    lines = Path("/proc/self", file).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak_memory() -> None:
    """Let VmHWM begin at what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def alternate(items: Iterable[Item], number: int) -> list[Item]:
    """The order of a round: every other one is backwards."""
    return list(items)[:: 1 if number % 2 else -1]


def shuffle(items: Iterable[Item], number: int) -> list[Item]:
    """The order of a round, drawn by its number."""
    ordered = list(items)
    return random.Random(number).sample(ordered, len(ordered))


def seconds(run: Step, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes."""
    start = clock()
    run()
    return clock() - start


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def timed(step: Step) -> Side:
    """A step in this process."""

    def side() -> dict[str, float]:
        start = {name: clock() for name, clock in CLOCKS.items()}
        step()
        return {name: clock() - start[name] for name, clock in CLOCKS.items()}

    return side


def compare(actual: Side, expected: Side, rounds: int) -> dict[str, list[float]]:
    """Their seconds over ours by each clock, round by round, after two steps to warm up; who goes first alternates."""
    sides = {"ours": actual, "theirs": expected}
    for side in sides.values():
        side(), side()
    ratios: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    for number in range(rounds):
        elapsed = {name: sides[name]() for name in alternate(sides, number)}
        for clock, values in ratios.items():
            values.append(elapsed["theirs"][clock] / elapsed["ours"][clock])
    return ratios


def summarize(ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median, the lowest and the highest by each clock."""
    return {
        f"{clock}{suffix}": choose(values)
        for clock, values in ratios.items()
        for suffix, choose in (("", statistics.median), ("_lowest", min), ("_highest", max))
    }


def inline_toml(value: object) -> str:
    """A value as a config's inline TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {inline_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def moe_section(
    d_ff: int,
    router: Mapping[str, object],
    *,
    experts: int = 8,
    top_k: int = 2,
    n_shared_experts: int = 0,
    **more: Any,
) -> dict[str, object]:
    """Settings of experts with as many active weights as a dense network of d_ff; shared ones count as active."""
    sizes = {"d_ff": d_ff // (top_k + n_shared_experts), "n_experts": experts, "top_k": top_k}
    return {"name": "moe", **sizes, "n_shared_experts": n_shared_experts, **more, "router": router}
