"""Kills at seeded moments: a run that is killed again and again ends as if it never had been.

`python -m tests.support.kill_series CORPUS FOLDER '{"alone": 6}' --seed 0` forks every rank from one process that has
imported all there is to import, kills one of them in the middle of a step or of a part of a save, starts again from
what is there, and at the end compares the curve and every stored bit with runs that nobody killed. It prints one JSON
object.
"""

import argparse
import contextlib
import fcntl
import importlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import megatfm.train.run  # noqa: F401  imported before the fork, as all that is slow to import
from megatfm import checkpoint, cli
from megatfm.checkpoint import chunked_io, file_format, saver, staging, writer
from megatfm.checkpoint.directory import step_from_path
from megatfm.launchers.local import find_free_port
from tests.support.forked_commands import keep_last_override
from tests.support.rank_processes import engine_class, make_rank_variables, set_up_rank
from tests.support.training_runs import training_curve

ENGINES = ("native", "deepspeed") if importlib.util.find_spec("deepspeed") else ("native",)
SLOW_SECONDS = 0.001
"""Extra seconds of each operation of a save: steps go on meanwhile, as with a large model's disk."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL one rank at the n-th event of a phase, counted from 1. settle: the other ranks end by themselves."""

    rank: int
    phase: str
    event: int
    settle: bool = False


def fork_process(work: Callable[[], None]) -> int:
    """Run a function in a forked process; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(70)
    return pid


def wait_for_any(pids: Sequence[int], deadline: float) -> tuple[int, int]:
    """The next of these that ends, and its status; (0, 0) after the deadline, when all are killed."""
    while time.monotonic() < deadline:
        for pid in pids:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return ended, status
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0, 0


def run_rank(
    words: list[str],
    variables: dict[str, str],
    output: Path,
    kill: Kill | None = None,
    hit: Path | None = None,
    counts: Path | None = None,
) -> None:
    """`megatfm train` as one rank; of four or more, past the page cache, as large files are written and read."""
    set_up_rank(variables, output)
    if int(variables["WORLD_SIZE"]) >= 4:
        file_format.DIRECT_BYTES = 0
        chunked_io._is_in_page_cache = lambda fd, size: False
    events = EventCounter(kill, hit)
    if hit:
        events.install_hooks()
    code = 1
    try:
        cli.main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    if counts:
        counts.write_text(json.dumps(events.seen))
    os._exit(code)


@dataclass
class EventCounter:
    """Counts what happens in each phase of this process, and ends it at the chosen moment."""

    kill: Kill | None
    hit: Path | None
    seen: Counter[str] = field(default_factory=Counter)
    phase: str = "write"
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_event(self, phase: str, first: Callable[[], object] = lambda: None) -> None:
        """One event. first: what is still done before the kill."""
        with self._lock:
            self.seen[phase] += 1
            if self.kill and self.hit and (self.kill.phase, self.kill.event) == (phase, self.seen[phase]):
                first()
                self.hit.write_text(phase)
                os.kill(os.getpid(), signal.SIGKILL)

    def install_hooks(self) -> None:
        """A step is made of the calls of its modules; staging of pieces; all else of operations on the disk."""
        torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self.count_event("step"))
        for name in ("forward_backward", "step"):
            for engine in map(engine_class, ENGINES):
                setattr(engine, name, self._count_around(getattr(engine, name), "step"))
        copy = staging._copy

        def counted(*part: Any) -> None:
            self.count_event("staging")
            copy(*part)

        vars(staging)["_copy"] = counted
        writer.commit = self._set_phase_during(writer.commit, "metadata")
        vars(saver)["purge_old_checkpoints"] = self._set_phase_during(vars(saver)["purge_old_checkpoints"], "retention")
        for name in ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, self._wrap_operation(name, getattr(os, name)))

    def _count_around(self, genuine: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count_event(phase)
            result = genuine(*args, **kwargs)
            self.count_event(phase)
            return result

        return counted

    def _set_phase_during(self, genuine: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            self.phase = phase
            try:
                return genuine(*args, **kwargs)
            finally:
                self.phase = "write"

        return in_phase

    def _wrap_operation(self, name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != "megatfm-save":
                return genuine(*args, **kwargs)
            time.sleep(SLOW_SECONDS)
            if name == "rename" and self.phase == "metadata":
                self.phase = "commit"
            half = (lambda: genuine(args[0], _first_half(*args))) if name == "write" else lambda: None
            if name != "open" or args[1] & os.O_CREAT:
                self.count_event(self.phase, half)
            return genuine(*args, **kwargs)

        return operation


def _first_half(file: int, data: memoryview) -> memoryview:
    """The first half of the data; past the page cache, of its complete blocks."""
    direct = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
    return data[: len(data) // 2 // chunked_io.BLOCK_BYTES * chunked_io.BLOCK_BYTES if direct else len(data) // 2]


PHASES = ("step", "staging", "write", "metadata", "commit", "retention")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "zero 3 on 2": (2, ("parallel.dp_shard=2",)),
    "stages on 2": (2, ("parallel.pp=2",)),
    **(
        {"DeepSpeed's zero 2 on 2": (2, ("parallel.engine=deepspeed", "parallel.zero=2"))}
        if "deepspeed" in ENGINES
        else {}
    ),
    "zero 1 on 4": (4, ("parallel.dp_shard=4", "parallel.zero=1")),
    "stages and zero 3 on 4": (4, ("parallel.pp=2", "parallel.dp_shard=2")),
}
"""Name → ranks, and the words that ask for it. The last three phases are rank 0's alone."""
STEPS, EVERY = 24, 2
PATIENCE_SECONDS = 120.0
TRIES = 4
"""Attempts of a kill: a run may end before the chosen event."""

CONFIG = f"""
name = "crashes"
model = {{ d_model = 16, n_layers = 1, attention = {{ n_heads = 2 }}, ffn = {{ d_ff = 32 }} }}
data = {{ train = "CORPUS/train", tokenizer = "CORPUS/tokenizer.model", sequence_length = 16 }}
optimizer = {{ lr = 1e-3 }}
lr_schedule = {{ warmup_steps = 2 }}
train = {{ steps = {STEPS}, global_batch = 4, micro_batch = 1, precision = "fp32", hang_seconds = 60 }}
checkpoint = {{ every = {EVERY}, keep = 1 }}
log = {{ sinks = [] }}
resilience = {{ preflight = false }}
"""


@dataclass
class KillSeries:
    """The kills of one layout, in run directories under `folder`."""

    config: str
    folder: Path
    world: int
    overrides: Sequence[str]
    hits: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run_reference(self) -> dict[int, Counter[str]]:
        """A run that nobody kills; returns the events of each phase by rank."""
        self._run_ranks(self.folder / "whole", None)
        return {
            rank: Counter(json.loads((self.folder / f"events-{rank}.json").read_text())) for rank in range(self.world)
        }

    def kill(self, kills: Sequence[Kill]) -> None:
        """One after the other; raises AssertionError where a run doesn't end as the reference did."""
        run, newest = self._next_run_folder(), 0
        for kill in kills:
            for _ in range(TRIES):
                if self._run_ranks(run, kill):
                    break
                self.compare_with_reference(run)  # it came to the end before: compare it, and begin another
                run, newest = self._next_run_folder(), 0
            else:
                raise AssertionError(f"never came so far: {kill}")
            self.hits[kill.phase] += 1
            latest = checkpoint.find_latest(run / "checkpoints", hashes=True)
            step = step_from_path(latest) if latest else 0
            assert step >= newest, f"step {newest} was there, and now it is {step}: {kill}"
            newest = step
        assert not self._run_ranks(run, None)
        self.compare_with_reference(run)

    def compare_with_reference(self, run: Path) -> None:
        """The curve and the last checkpoint of a run, bit for bit."""
        full = self.folder / "whole"
        assert training_curve(run) == training_curve(full), f"{run}: another curve"
        assert [line["step"] for line in training_curve(run)] == list(range(1, STEPS + 1))
        name = f"checkpoints/step-{STEPS:08d}"
        actual, expected = (checkpoint.read_tensors(folder / name) for folder in (run, full))
        assert actual.keys() == expected.keys()
        differ = [key for key, tensor in actual.items() if not torch.equal(tensor, expected[key])]
        assert not differ, f"{run}: {differ}"
        mine_state, their_state = (checkpoint.read_state(folder / name) for folder in (run, full))
        assert mine_state["data"] == their_state["data"]
        shutil.rmtree(run)

    def _next_run_folder(self) -> Path:
        self.runs += 1
        return self.folder / f"run-{self.runs}"

    def _run_ranks(self, run: Path, kill: Kill | None) -> bool:
        """Start all ranks and wait for them; returns whether the kill was carried out."""
        start, number = time.monotonic(), next(self._numbers)
        port = find_free_port()
        output = [self.folder / f"said-{number}-{rank}" for rank in range(self.world)]
        hit = self.folder / f"hit-{number}"
        pids = {}
        for rank in range(self.world):
            variables = make_rank_variables(rank, self.world, port)
            words = keep_last_override(["train", self.config, f"run_dir={run}", *self.overrides])
            counts = self.folder / f"events-{rank}.json" if run.name == "whole" else None
            kill_here = kill if kill and kill.rank == rank else None
            pids[fork_process(lambda: run_rank(words, variables, output[rank], kill_here, hit, counts))] = rank  # noqa: B023
        codes: dict[int, int] = {}
        while pids:
            pid, status = wait_for_any(list(pids), start + PATIENCE_SECONDS)
            assert pid, f"{run}: still running after {PATIENCE_SECONDS:.0f} s: {output[0].read_text()}"
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            if kill and codes.get(kill.rank) == -signal.SIGKILL and not kill.settle:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
        self.seconds.append(time.monotonic() - start)
        text = "\n".join(path.read_text() for path in output)
        if hit.exists():
            assert kill
            assert hit.read_text() == kill.phase
            assert codes[kill.rank] == -signal.SIGKILL
            assert not kill.settle or all(codes[rank] == 1 for rank in codes if rank != kill.rank), text
            return True
        assert set(codes.values()) == {0}, f"{run}: {codes}\n{text}"
        return False


def draw_kills(phases: Sequence[str], world: int, events: Mapping[int, Mapping[str, int]], seed: str) -> list[Kill]:
    """Seeded kills, one in each of these phases, in an order that is drawn, in one of the first two saves."""
    draw = random.Random(seed)
    kills = []
    for number, phase in enumerate(draw.sample(phases, len(phases))):
        rank = draw.choice([r for r in range(world) if events[r].get(phase)])
        per_save = events[rank][phase] * EVERY / STEPS
        event = draw.randint(1, max(1, round((1 if phase == "retention" else 2) * per_save)))
        kills.append(Kill(rank, phase, event, settle=world > 1 and number % 3 == 0))
    return kills


def divide_kills(kills: int) -> dict[str, int]:
    """Kills by layout: most on one rank, and as many on each other layout."""
    remaining = {layout: kills * 3 // 23 for layout in LAYOUTS if layout != "alone"}
    return {"alone": kills - sum(remaining.values()), **remaining}


def run_series(
    corpus: Path, folder: Path, kills: Mapping[str, int], seed: int, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Kills by layout, which go through the phases by turns; returns hits, runs that were compared, and seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "crashes.toml"
    config.write_text(CONFIG.replace("CORPUS", str(corpus)))
    hits: Counter[str] = Counter()
    by_layout: dict[str, dict[str, int]] = {}
    start, starts, runs, phases = time.monotonic(), 0, 0, itertools.cycle(PHASES)
    for layout, count in kills.items():
        if not count:
            continue
        world, words = LAYOUTS[layout]
        series = KillSeries(str(config), folder / layout.replace(" ", "-"), world, [*words, *overrides])
        series.folder.mkdir()
        due = list(itertools.islice(phases, count))
        series.kill(draw_kills(due, world, series.run_reference(), f"{seed} {layout}"))
        hits += series.hits
        by_layout[layout] = dict(series.hits)
        starts += len(series.seconds)
        runs += series.runs
    seconds = round(time.monotonic() - start, 1)
    return {
        "hits": dict(hits), "hits by layout": by_layout, "kills": sum(hits.values()), "starts": starts,
        "compared": runs, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    """Run a series of kills for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kills", type=json.loads, help="how many by layout, as a JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    requested = "".join(word for layout in inputs.kills for word in LAYOUTS[layout][1])
    for slow in (engine for engine in ENGINES if f"engine={engine}" in requested):
        importlib.import_module(slow)  # once, and not in every rank
    torch.empty(1, device="meta").to(torch.float64)  # slow the first time
    with contextlib.redirect_stdout(sys.stderr):
        report = run_series(inputs.corpus, inputs.folder, inputs.kills, inputs.seed, inputs.overrides)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
