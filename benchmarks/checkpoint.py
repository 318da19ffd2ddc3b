"""Save and load against `dd` with fsync on the same disk, and how long a step stalls.

    python benchmarks/checkpoint.py /disk/folder                  # 1 GB, 1 and 2 ranks, 10 rounds
    python benchmarks/checkpoint.py /disk/folder --gigabytes 0.2 --rounds 2 --ranks 1 --out /dev/null

Every round takes each measure once, in turn, so that a disk that slows down slows all of them; medians of the ratios
within a round are what counts. `dd` writes as many bytes into a new file in blocks of 8 MB and syncs (conv=fsync),
once through the page cache and once past it (oflag=direct), and reads the very files that the load reads, both ways,
too, each time after their pages were dropped from memory. Who goes first alternates. The stall is what a step (half a
second of matrix products on one core) takes longer with a save that begins before it, until the weights may change;
the write then goes on. "blocked" is the part of it in which the step only waits for the copy or helps with it; the
rest is what the background takes of processor and memory meanwhile. The first save also takes its memory, and isn't
counted.
"""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatfm import checkpoint
from megatfm.checkpoint import file_io

BLOCK = 8 * 2**20
PRODUCTS = 40
RESULT = Path(__file__).parent / "results" / f"{common.today()}-checkpoint.json"
Read = tuple[str, Callable[[], object], bool]
"""Name, function that is timed, and whether all ranks call it."""


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="a new folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=common.make_output_file, default=RESULT, help="where to write the result as JSON")
    args = parser.parse_args()
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
    facts = {
        "date": common.today(),
        "machine": common.describe_system(),
        "torch": torch.__version__,
        "gigabytes": args.gigabytes,
        "rounds": args.rounds,
        "results": results,
    }
    common.write_json(args.out, facts)


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
        print(f"  {name:40}{value:8.1%}")
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


if __name__ == "__main__":
    main()
