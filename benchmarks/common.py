"""Arguments, results, machine facts and turns, shared by the scripts of this folder; needs Python alone.

Sides take turns, round by round: other work on the machine disturbs all alike, so ratios within a round are reliable
where seconds are not.
"""

import argparse
import functools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.library import Library

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for what scripts share with tests
RESULTS = ROOT / "benchmarks" / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""The CPU clock counts all threads, and is disturbed less by other work on the machine."""
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Instructions for matmuls, the best first."""

Key = TypeVar("Key")
Value = TypeVar("Value")
Step = Callable[[], object]
Side = Callable[[], dict[str, float]]
"""A function that takes a step and returns its seconds by clock."""
Run = Callable[[argparse.Namespace], int | None]
"""A part of a script, which runs with its arguments."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring, line by line."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def argument(*names: str, **options: Any) -> Callable[[Run], Run]:
    """Decorate a function with an argument that it reads, declared as for `ArgumentParser.add_argument`."""

    def declare(run: Run) -> Run:
        run.__dict__.setdefault("arguments", []).insert(0, (names, options))
        return run

    return declare


def run_part(description: str | None, parts: Mapping[str, Run], words: Sequence[str] | None = None) -> int:
    """Run the part of a script that the first word names, with the arguments that it declares; return its exit code."""
    parser = make_parser(description)
    commands = parser.add_subparsers(metavar="PART", required=True)
    for name, run in parts.items():
        add_arguments(commands.add_parser(name), run)
    args = parser.parse_args(words)
    return args.run(args) or 0


def run_script(description: str | None, run: Run, words: Sequence[str] | None = None) -> int:
    """Run a script of one part; return its exit code."""
    parser = make_parser(description)
    add_arguments(parser, run)
    args = parser.parse_args(words)
    return args.run(args) or 0


def add_arguments(parser: argparse.ArgumentParser, run: Run) -> None:
    """Add the arguments that a function declares, and the function as `run`."""
    for names, options in run.__dict__.get("arguments", ()):
        parser.add_argument(*names, **options)
    parser.set_defaults(run=run)


def make_output_folder(path: str) -> Path:
    """Make a folder when the command line is parsed, before anything is measured. A type for argparse."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_output_file(path: str) -> Path:
    """Return a path after its folder is made. A type for argparse."""
    make_output_folder(str(Path(path).parent))
    return Path(path)


def today() -> str:
    return date.today().isoformat()


def make_dated_path(folder: Path | None, name: str) -> Path | None:
    """Return FOLDER/DATE-NAME, the path of a result of today; None without a folder."""
    return folder and folder / f"{today()}-{name}"


def write_text(path: Path | None, text: str) -> None:
    """Write a result; nothing without a path."""
    if path:
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def write_json(path: Path | None, value: object) -> None:
    """Write a result; nothing without a path."""
    write_text(path, json.dumps(value, indent=1))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write a file of JSON lines, after its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def run_megatfm(*words: str) -> float:
    """Run a command of megatfm on one thread; its output is shown only if it fails. Raises SystemExit.

    Returns its CPU seconds, if no other child process ends meanwhile.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "megatfm", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}\n{finished.stdout[-2000:]}{finished.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Page:
    """A result in Markdown: lines are printed as they come, and the file is written anew with each.

    The title gets the date. table: the head of a table that follows.
    """

    def __init__(self, path: Path | None, title: str, *notes: str, table: str = "") -> None:
        self.path = path
        self.lines = [f"# {title}, {today()}", *([""] if notes else []), *notes, *make_table_head(table)]
        print("\n".join(self.lines), flush=True)

    def add(self, *lines: str, table: str = "") -> None:
        lines = (*lines, *make_table_head(table))
        self.lines += lines
        print("\n".join(lines), flush=True)
        write_text(self.path, "\n".join(self.lines))


def make_table_head(names: str) -> list[str]:
    """Return the first lines of a table whose columns are named; none without names."""
    return ["", names, "|" + "---|" * (names.count("|") - 1)] if names else []


def format_error(error: Exception, longest: int = 160) -> str:
    """Return the first line of an error, as a cell of a table."""
    first = str(error).partition("\n")[0].replace("|", "/")[:longest]
    return f"{type(error).__name__}: {first}"


def get_cpu_name(*, instructions: bool = False) -> str:
    """Return the CPU's name, or its architecture if Linux names none. instructions: add the best one for matmuls."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    facts = dict(reversed([[word.strip() for word in line.split(":", 1)] for line in lines if ":" in line]))
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    best = next((f" ({flag})" for flag in INSTRUCTIONS if flag in flags), "")
    return name + best * instructions


def describe_system() -> str:
    """Return the operating system and the number of cores."""
    return f"{platform.platform()}, {os.cpu_count()} cores"


@functools.cache  # which keeps the library: it owns the operators
def declare_torchvision_operators() -> "Library":
    """Declare operators that torchvision's import asks for, and that a wheel for another device than torch's lacks."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def get_device_name(device: str) -> str:
    """Return the name of the GPU that torch uses; "a CPU" elsewhere."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "a CPU"


def count_storage_bytes(tensors: "Iterable[Tensor]") -> int:
    """Return the bytes of tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure_saved_bytes(run: Callable[[], Value], weights: "Iterable[Tensor]") -> tuple[int, Value]:
    """Return the bytes that a forward pass keeps for its backward pass, without weights, and its result."""
    from torch.autograd.graph import saved_tensors_hooks

    weight_storages = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: list[Tensor] = []

    def pack(tensor: "Tensor") -> "Tensor":
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    activations = (tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in weight_storages)
    return count_storage_bytes(activations), result


def read_memory(key: str, file: str = "status") -> int:
    """Return a figure of /proc/self in bytes: VmRSS (resident), VmHWM (its peak), or Pss of `smaps_rollup`."""
    lines = Path("/proc/self", file).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak_memory() -> None:
    """Reset VmHWM to the present resident memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def alternate_order(items: Iterable[Key], number: int) -> list[Key]:
    """Return the items in order, reversed every other round."""
    return list(items)[:: 1 if number % 2 else -1]


def shuffle_order(items: Iterable[Key], number: int) -> list[Key]:
    """Return the items in an order that is drawn by the round's number."""
    ordered = list(items)
    return random.Random(number).sample(ordered, len(ordered))


def take_turns(
    calls: Mapping[Key, Callable[[], Value]],
    rounds: int,
    order: Callable[[Iterable[Key], int], list[Key]] = alternate_order,
    *,
    warmup: int = 0,
) -> dict[Key, list[Value]]:
    """Return what each call returns by round, all in turns, after `warmup` rounds that don't count."""
    values: dict[Key, list[Value]] = {name: [] for name in calls}
    for number in range(-warmup, rounds):
        for name in order(calls, number):
            value = calls[name]()
            if number >= 0:
                values[name].append(value)
    return values


def time_call(run: Step, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    start = clock()
    run()
    return clock() - start


def compute_median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def make_side(step: Step) -> Side:
    """Return a side that takes its steps in this process."""

    def side() -> dict[str, float]:
        start = {name: clock() for name, clock in CLOCKS.items()}
        step()
        return {name: clock() - start[name] for name, clock in CLOCKS.items()}

    return side


def compare(actual: Side, expected: Side, rounds: int, *, warmup: int = 2) -> dict[str, list[float]]:
    """Return expected / actual seconds by clock and round, after steps to warm up; who goes first alternates."""
    for side in (actual, expected):
        for _ in range(warmup):
            side()
    seconds = take_turns({"ours": actual, "theirs": expected}, rounds)
    pairs = list(zip(seconds["theirs"], seconds["ours"], strict=True))
    return {clock: [theirs[clock] / ours[clock] for theirs, ours in pairs] for clock in CLOCKS}


def summarize(ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median, the lowest and the highest by clock."""
    return {
        f"{clock}{suffix}": choose(values)
        for clock, values in ratios.items()
        for suffix, choose in (("", statistics.median), ("_lowest", min), ("_highest", max))
    }


def call_in_new_process(function: Callable[..., Value], *arguments: Any) -> Value:
    """Call a module's function in a fresh Python, which holds no memory or cache of another case."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class SideProcess:
    """A side in a separate process that takes a step for each line it is sent, and answers with its seconds.

    The process runs the script with `--job` and the job in JSON. first: wall seconds of its first step.
    """

    def __init__(self, script: str, job: Mapping[str, object]) -> None:
        command = [sys.executable, script, "--job", json.dumps(job)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self()["wall"]

    def __call__(self) -> dict[str, float]:
        assert self._process.stdin
        assert self._process.stdout
        print(file=self._process.stdin, flush=True)
        seconds: dict[str, float] = json.loads(self._process.stdout.readline())
        return seconds

    def close(self) -> None:
        """End the process, and wait for it."""
        self._process.communicate()


def compare_processes(
    script: str, ours: Mapping[str, object], theirs: Mapping[str, object], pairs: int, rounds: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """Compare two jobs of a script in several pairs of processes, since two processes of the same code differ.

    Returns the summary of the ratios of all rounds, and the seconds of the last pair's first steps: theirs, ours.
    """
    ratios: dict[str, list[float]] = {}
    for _ in range(pairs):
        sides = SideProcess(script, ours), SideProcess(script, theirs)
        for clock, values in compare(*sides, rounds).items():
            ratios.setdefault(clock, []).extend(values)
        for side in sides:
            side.close()
    return summarize(ratios), (sides[1].first, sides[0].first)


def format_toml(value: object) -> str:
    """Format a value as inline TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {format_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
