"""Checkpoints: speed of saving and loading against `dd`, and training whose ranks are killed.

    python benchmarks/checkpoint.py speed /disk/folder                # 1 GB, 1 and 2 ranks, 10 rounds
    python benchmarks/checkpoint.py speed /disk/folder --gigabytes 0.2 --rounds 2 --ranks 1 --out /dev/null
    python benchmarks/checkpoint.py kills                             # 100 kills, then 30 minutes: make soak
    python benchmarks/checkpoint.py kills --kills 12 --minutes 3

speed: save and load against `dd` with fsync on the same disk, and how long a step stalls. Every round takes each
measure once, in turn, so that a disk that slows down slows all of them; medians of the ratios within a round are what
counts. `dd` writes as many bytes into a new file in blocks of 8 MB and syncs (conv=fsync), once through the page cache
and once past it (oflag=direct), and reads the very files that the load reads, both ways, too, each time after their
pages were dropped from memory. Who goes first alternates. The stall is what a step (half a second of matrix products on
one core) takes longer with a save that begins before it, until the weights may change; the write then goes on.
"blocked" is the part of it in which the step only waits for the copy or helps with it; the background takes the other
part from processor and memory. The first save also takes its memory, and isn't counted.

kills: a hundred kills at seeded moments, after which every curve and every stored bit is compared with runs that nobody
killed (`tests/support/kill_series.py`). Then a run whose ranks are killed every ~20 seconds. Effective training: the
seconds of steps that are part of the final record (each step once), over the wall time less what processes take from
their start to their first step. No step before the last save may be lost.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatfm import checkpoint, data_prep
from megatfm.checkpoint import file_io
from megatfm.config import load_section
from megatfm.config.prep import PrepConfig
from megatfm.launchers.local import find_free_port
from tests.support import kill_series
from tests.support.rank_processes import make_rank_variables

# ---------------------------------------------------------------------------------------------------- speed

BLOCK = 8 * 2**20
PRODUCTS = 40
RESULT = common.make_dated_path(common.RESULTS, "checkpoint.json")
Read = tuple[str, Callable[[], object], bool]
"""Name, function that is timed, and whether all ranks call it."""


@common.argument("folder", type=Path, help="a new folder on the disk to measure")
@common.argument("--gigabytes", type=float, default=1.0)
@common.argument("--rounds", type=int, default=10)
@common.argument("--ranks", type=int, nargs="*", default=[1, 2])
@common.argument("--out", type=common.make_output_file, default=RESULT, help="where to write the result as JSON")
def run_speed(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True)
    results = []
    try:
        for world in args.ranks:
            answers = mp.get_context("spawn").SimpleQueue()
            arguments = (world, args.folder, int(args.gigabytes * 1e9), args.rounds, answers)
            mp.spawn(measure, arguments, nprocs=world)
            results.append(report(answers.get(), world))
    finally:
        shutil.rmtree(args.folder)
    sizes = {"gigabytes": args.gigabytes, "rounds": args.rounds}
    common.write_json(args.out, {**describe_run(), **sizes, "results": results})


def describe_run() -> dict[str, str]:
    return {"date": common.today(), "machine": common.describe_system(), "torch": torch.__version__}


def report(rounds: list[dict[str, float]], world: int) -> dict[str, Any]:
    """Print and return the medians over rounds of seconds and ratios."""
    seconds = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}

    def ratio(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(value, rounds))

    ratios = {
        "save, of dd's speed": ratio(lambda r: r["dd write"] / r["save"]),
        "save, of direct dd's speed": ratio(lambda r: r["dd write, direct"] / r["save"]),
        "load, of dd's speed": ratio(lambda r: r["dd read"] / r["load"]),
        "load, of direct dd's speed": ratio(lambda r: r["dd read, direct"] / r["load"]),
        "stall, of a save": ratio(lambda r: (r["step that saves"] - r["step"]) / r["save"]),
        "blocked, of a save": ratio(lambda r: r["blocked"] / r["save"]),
    }
    print(f"{world} rank{'s' * (world > 1)}")
    for name, value in seconds.items():
        print(f"  {name:40}{value:8.3f} s")
    for name, value in ratios.items():
        print(f"  {name:40}{100 * value:8.1f} %")
    return {"ranks": world, "seconds": seconds, "ratios": ratios, "rounds": rounds}


def measure(rank: int, world: int, folder: Path, size: int, rounds: int, answers: Any) -> None:
    """Run all rounds on one rank; rank 0 puts the seconds into `answers`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    bench, target = Bench(rank, folder, make_state(rank, world, size)), folder / f"on-{world}"
    rounds_measured = []
    with checkpoint.Saver(target, keep=1) as background, checkpoint.Saver(target, mode="sync", keep=1) as plain:
        background.save(0, bench.tensors, {})  # takes the memory
        background.wait_for_save()
        for number in range(rounds):
            rounds_measured.append(bench.run_round(number, background, plain))
    if rank == 0:
        answers.put(rounds_measured)
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Bench:
    """Measurements of one rank. seconds: by measure, of the current round."""

    rank: int
    folder: Path
    tensors: dict[str, checkpoint.ShardedTensor | torch.Tensor]
    seconds: dict[str, float] = field(default_factory=dict)

    def run_round(self, number: int, background: checkpoint.Saver, plain: checkpoint.Saver) -> dict[str, float]:
        """Take each measure once, in reverse order every other round; return seconds by measure."""
        self.seconds = {}
        writes = (
            self.write_with_dd,
            lambda: self.write_with_dd("oflag=direct"),
            lambda: self.time_work("save", lambda: plain.save(2 * number + 1, self.tensors, {})),
        )
        for write in common.alternate_order(writes, number):
            write()
        self.time_work("step", multiply_matrices)
        newest = self.step_that_saves(2 * number + 2, background)
        reads: tuple[Read, ...] = (
            ("dd read", lambda: self.read_with_dd(newest), False),
            ("dd read, direct", lambda: self.read_with_dd(newest, "iflag=direct"), False),
            ("load", lambda: checkpoint.load(newest, self.tensors), True),
        )
        for name, read, by_all in common.alternate_order(reads, number):
            if self.rank == 0:
                for path in newest.iterdir():
                    file_io.drop_page_cache(path)
            self.time_work(name, read, by_all)
        return self.seconds

    def time_work(self, name: str, work: Callable[[], object], by_all: bool = True) -> None:
        """Record the seconds of a call between barriers. by_all: on all ranks, else on rank 0 alone."""
        dist.barrier()
        start = time.perf_counter()
        if by_all or self.rank == 0:
            work()
        dist.barrier()
        self.seconds[name] = time.perf_counter() - start

    def step_that_saves(self, number: int, saver: checkpoint.Saver) -> Path:
        """Take a step beside which a save begins; return the checkpoint, once it is complete."""
        blocked = 0.0

        def both() -> None:
            nonlocal blocked
            start = time.perf_counter()
            saver.save(number, self.tensors, {}, wait_for_staging=False)
            blocked = time.perf_counter() - start
            multiply_matrices()
            start = time.perf_counter()
            saver.wait_for_staging()
            blocked += time.perf_counter() - start

        start = time.perf_counter()
        self.time_work("step that saves", both)
        self.seconds["blocked"] = blocked
        path = saver.wait_for_save()
        dist.barrier()
        self.seconds["save beside a step"] = time.perf_counter() - start
        assert path is not None
        return path

    def write_with_dd(self, *words: str) -> None:
        size = sum(checkpoint.ShardedTensor.from_tensor(tensor).tensor.nbytes for tensor in self.tensors.values())
        file, size = self.folder / "dd", size * dist.get_world_size()
        name = "dd write, direct" if words else "dd write"
        self.time_work(name, lambda: run_dd("/dev/zero", file, size, "conv=fsync", *words), by_all=False)
        if self.rank == 0:
            file.unlink()

    def read_with_dd(self, checkpoint: Path, *words: str) -> None:
        for path in sorted(checkpoint.glob("*.safetensors")):
            run_dd(path, Path("/dev/null"), path.stat().st_size, *words)


def multiply_matrices() -> None:
    """Multiply matrices, as a training step does meanwhile."""
    values = torch.ones(1024, 1024)
    for _ in range(PRODUCTS):
        values @ values


def run_dd(source: str | Path, target: Path, size: int, *words: str) -> None:
    count = f"count={-(-size // BLOCK)}"
    command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK}", count, "status=none", *words]
    subprocess.run(command, check=True)


def make_state(rank: int, world: int, size: int) -> dict[str, checkpoint.ShardedTensor | torch.Tensor]:
    """Return weights and two moments of matrices of 4,096 columns, sharded by rows."""
    columns, layers = 4096, 16
    rows = max(1, size // (4 * columns * layers * 3 * world))
    draw = torch.Generator().manual_seed(rank)
    return {
        f"{kind}.layers.{layer}": checkpoint.ShardedTensor(
            torch.randn(rows, columns, generator=draw), (rows * world, columns), (rows * rank, 0)
        )
        for layer in range(layers)
        for kind in ("model", "optimizer.m", "optimizer.v")
    }


# ---------------------------------------------------------------------------------------------------- kills

EVERY = 5
PREP = """
out = "{out}"
[read]
folder = "{texts}"
[split]
validation = 0.2
[tokenizer]
vocab_size = 512
"""


@common.argument("--kills", type=int, default=100)
@common.argument("--minutes", type=float, default=30.0)
@common.argument("--between", type=float, default=20.0, help="seconds between kills, on average")
@common.argument("--ranks", type=int, default=2)
@common.argument("--seed", type=int, default=1)
@common.argument("--out", type=common.make_output_file, help="where to write the result as JSON")
def run_kills(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.empty(1, device="meta").to(torch.float64)  # slow the first time
    with tempfile.TemporaryDirectory(prefix="megatfm-soak-") as name:
        folder = Path(name)
        corpus = prepare(folder)
        with contextlib.redirect_stdout(sys.stderr):
            kills = kill_series.run_series(corpus, folder / "kills", kill_series.divide_kills(args.kills), args.seed)
        print("kills:", json.dumps(kills), flush=True)
        fire = train_with_kills(corpus, folder / "fire", args.minutes * 60, args.between, args.ranks, args.seed)
        print("under fire:", json.dumps(fire))
    numbers = f"--kills {args.kills} --minutes {args.minutes} --between {args.between}"
    facts = {**describe_run(), "command": f"benchmarks/checkpoint.py kills {numbers}"}
    common.write_json(args.out, {**facts, "kills": kills, "under fire": fire})


def prepare(folder: Path) -> Path:
    """Prepare a small corpus of the standard library's sources in a child process, since prep may start threads."""
    corpus = folder / "corpus"

    def make() -> None:
        texts = folder / "texts"
        texts.mkdir()
        for file in sorted(Path(json.__file__).parents[1].glob("*.py")):
            (texts / file.name).write_bytes(file.read_bytes())
        config = folder / "prep.toml"
        config.write_text(PREP.format(out=corpus, texts=texts))
        data_prep.run(load_section(PrepConfig, config))
        os._exit(0)

    pid = kill_series.fork_process(make)
    assert os.waitpid(pid, 0)[1] == 0, "the corpus could not be made"
    return corpus


def train_with_kills(
    corpus: Path, folder: Path, seconds: float, between: float, world: int, seed: int
) -> dict[str, Any]:
    """Train for `seconds`; at random intervals kill one rank, end the others, and restart all."""
    folder.mkdir()
    config = folder / "kill_series.toml"
    config.write_text(kill_series.CONFIG.replace("CORPUS", str(corpus)))
    run, draw = folder / "run", random.Random(seed)
    words = [
        "train", str(config), f"run_dir={run}", f"parallel.dp_shard={world}", "train.steps=100000000",
        "model.d_model=128", "model.ffn.d_ff=512", "model.n_layers=4", "data.sequence_length=64",
        f"checkpoint.every={EVERY}", "checkpoint.keep=2", "log.every=1000",
    ]  # fmt: skip
    begin, starting, starts, lost = time.monotonic(), 0.0, 0, Counter[str]()
    while time.monotonic() < begin + seconds:
        start = time.time()
        pids = start_ranks(words, world, folder)
        starts += 1
        while (last := read_last_step(run))["time"] < start and time.time() < start + kill_series.PATIENCE_SECONDS:
            time.sleep(0.01)
        assert last["time"] > start, (folder / "said-0").read_text()
        starting += last["time"] - last["step_seconds"] - start
        due = min(time.monotonic() + draw.uniform(0.5, 1.5) * between, begin + seconds)
        time.sleep(max(0.0, due - time.monotonic()))
        reached = read_last_step(run)["step"]
        os.kill(draw.choice(pids), signal.SIGKILL)
        for pid in pids:  # as a launcher does, once one has ended
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        saved = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
        lost["steps done again"] += max(0, reached - saved)
        lost["most at once"] = max(lost["most at once"], reached - saved)
        # One interval that was begun, and one whose save was still being written.
        assert reached - saved <= 3 * EVERY, f"at step {reached}, but the newest checkpoint is of {saved}"
    wall = time.monotonic() - begin
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    numbers = [line["step"] for line in lines]
    assert numbers == list(range(1, len(numbers) + 1)), "every step once"
    useful = sum(line["step_seconds"] for line in lines if line["step"] <= saved)
    return {
        "seconds": round(wall, 1), "starting seconds": round(starting, 1), "kills": starts, "ranks": world,
        "steps": saved, **lost, "effective": round(useful / (wall - starting), 4),
    }  # fmt: skip


def start_ranks(words: list[str], world: int, folder: Path) -> list[int]:
    port = find_free_port()
    pids = []
    for rank in range(world):
        variables = make_rank_variables(rank, world, port)
        output = folder / f"said-{rank}"
        pids.append(kill_series.fork_process(lambda: kill_series.run_rank(words, variables, output)))  # noqa: B023
    return pids


def read_last_step(run: Path) -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl."""
    path = run / "metrics.jsonl"
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            for line in reversed(file.read().split(b"\n")[:-1]):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
    return {"step": 0, "time": 0.0}


PARTS = {"speed": run_speed, "kills": run_kills}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
