"""Save and load against `dd` with fsync on the same disk, and how long a step stalls.

    python benchmarks/checkpoint.py /disk/folder                  # 1 GB, 1 and 2 ranks, 10 rounds
    python benchmarks/checkpoint.py /disk/folder --gigabytes 0.2 --rounds 2 --ranks 1

Every round takes each measure once, in turn, so that a disk that slows down slows all of them; medians of the ratios
within a round are what counts. `dd` writes as many bytes into a new file in blocks of 8 MB and syncs (conv=fsync), once
through the page cache and once past it (oflag=direct), and reads the very files that the load reads, both ways, too,
each time after their pages were dropped from memory. Who goes first alternates. The stall is what a step (half a second
of matrix products on one core) takes longer with a save that begins before it, until the weights may change; the write
then goes on. "blocked" is the part of it in which the step does nothing but wait; the rest is what the copy takes of
processor and memory where the ranks leave no core free. The first save also takes its memory, and isn't counted.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatfm import checkpoint
from megatfm.checkpoint import disk

BLOCK = 8 * 2**20
PRODUCTS = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    results = []
    try:
        for world in given.ranks:
            answers = mp.get_context("spawn").SimpleQueue()
            arguments = (world, given.folder, int(given.gigabytes * 1e9), given.rounds, answers)
            mp.spawn(measure, arguments, nprocs=world)
            results.append(report(answers.get(), world))
    finally:
        shutil.rmtree(given.folder)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "gigabytes": given.gigabytes,
        "rounds": given.rounds,
        "results": results,
    }
    if given.out:
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


def report(rounds: list[dict[str, float]], world: int) -> dict[str, Any]:
    """Medians over the rounds, of seconds and of the ratios that are asked for."""
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
        print(f"  {name:40}{value:8.1%}")
    return {"ranks": world, "seconds": seconds, "ratios": ratios, "rounds": rounds}


def measure(rank: int, world: int, folder: Path, size: int, rounds: int, answers: Any) -> None:
    """One rank of one number of ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    tensors = state(rank, world, size)
    target = folder / f"on-{world}"
    found = []
    with (
        checkpoint.Saver(target, keep=1) as background,
        checkpoint.Saver(target, mode="sync", keep=1) as plain,
    ):
        background.save(0, tensors, {})  # takes the memory
        background.finish()
        for number in range(rounds):
            found.append(one_round(rank, folder, target, 2 * number, tensors, background, plain))
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def one_round(
    rank: int,
    folder: Path,
    target: Path,
    number: int,
    tensors: dict[str, checkpoint.Box | torch.Tensor],
    background: checkpoint.Saver,
    plain: checkpoint.Saver,
) -> dict[str, float]:
    """Each measure once, in seconds."""
    seconds: dict[str, float] = {}
    size = sum(checkpoint.Box.of(tensor).tensor.nbytes for tensor in tensors.values()) * dist.get_world_size()
    file = folder / "dd"

    def timed(name: str, work: Callable[[], object], by_all: bool = True) -> None:
        dist.barrier()
        start = time.perf_counter()
        if by_all or rank == 0:
            work()
        dist.barrier()
        seconds[name] = time.perf_counter() - start

    def written_by_dd(name: str, *words: str) -> None:
        timed(name, lambda: dd("/dev/zero", file, size, "conv=fsync", *words), by_all=False)
        if rank == 0:
            file.unlink()

    writes: list[Callable[[], None]] = [
        lambda: written_by_dd("dd write"),
        lambda: written_by_dd("dd write, direct", "oflag=direct"),
        lambda: timed("save", lambda: plain.save(number + 1, tensors, {})),
    ]
    for write in writes if number % 4 else reversed(writes):
        write()
    timed("step", step)
    blocked = 0.0

    def step_that_saves() -> None:
        nonlocal blocked
        start = time.perf_counter()
        background.save(number + 2, tensors, {}, copied=False)
        blocked = time.perf_counter() - start
        step()
        start = time.perf_counter()
        background.settle()
        blocked += time.perf_counter() - start

    start = time.perf_counter()
    timed("step that saves", step_that_saves)
    seconds["blocked"] = blocked
    background.finish()
    dist.barrier()
    seconds["save beside a step"] = time.perf_counter() - start
    newest = target / f"step-{number + 2:08d}"

    def read_by_dd(*words: str) -> None:
        for path in sorted(newest.glob("*.safetensors")):
            dd(path, Path("/dev/null"), path.stat().st_size, *words)

    reads: list[tuple[str, Callable[[], object], bool]] = [
        ("dd read", read_by_dd, False),
        ("dd read, direct", lambda: read_by_dd("iflag=direct"), False),
        ("load", lambda: checkpoint.load(newest, tensors), True),
    ]
    for name, work, by_all in reads if number % 4 else reversed(reads):
        if rank == 0:
            for path in newest.iterdir():
                disk.forget(path)
        timed(name, work, by_all)
    return seconds


def step() -> None:
    """What a training step does meanwhile."""
    values = torch.ones(1024, 1024)
    for _ in range(PRODUCTS):
        values @ values


def dd(source: str | Path, target: Path, size: int, *words: str) -> None:
    count = f"count={-(-size // BLOCK)}"
    command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK}", count, "status=none", *words]
    subprocess.run(command, check=True)


def state(rank: int, world: int, size: int) -> dict[str, checkpoint.Box | torch.Tensor]:
    """Weights and two moments of a model of matrices of 4,096 columns, cut by rows."""
    columns, layers = 4096, 16
    rows = max(1, size // (4 * columns * layers * 3 * world))
    draw = torch.Generator().manual_seed(rank)
    return {
        f"{kind}.layers.{layer}": checkpoint.Box(
            torch.randn(rows, columns, generator=draw), (rows * world, columns), (rows * rank, 0)
        )
        for layer in range(layers)
        for kind in ("model", "optimizer.m", "optimizer.v")
    }


if __name__ == "__main__":
    main()
