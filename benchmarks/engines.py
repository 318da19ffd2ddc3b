"""Whole training steps under the native engine and under DeepSpeed: same model, layout, rows and optimizer.

    python benchmarks/engines.py --ranks 2 --rounds 10 --out benchmarks/results/DATE-engines.md

Both engines are built in the same processes, as `megatfm train` builds them, and take steps in turn; they alternate
who goes first. A step is forward and backward passes, gradient norm, clipping and AdamW. A ratio is the median over
rounds of (DeepSpeed's seconds / native's): above 1, native is faster. Seconds are taken on rank 0, of the clock between
barriers, and of its CPU. Memory is the peak of a rank's resident set (on a GPU, of what torch has allocated) over what
it was before the engine was built, each engine in processes of its own. Traffic is what rank 0 sends in a step, counted
where torch dispatches collectives. Absolute times mean nothing by themselves.

With --offload PLACE, a folder on a local disk, DeepSpeed's stage 3 takes steps in turn with everything on the device,
with optimizer and parameters on the host, and with them in files of that folder. Bandwidth is what a rank reads from
files and writes to them (for the host: gradients there, weights back), over the seconds that a step takes longer than
one that offloads nothing, in the median of the rounds. Files go through the system's cache; beside it stands what the
disk does by itself, past the cache, in blocks of 1 MiB: where memory is free, a run may be faster than that.
"""

import argparse
import functools
import gc
import importlib
import mmap
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatfm.config import Config, load_config
from megatfm.engines.interface import Engine
from megatfm.models import build
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.verify.shrink import draw_batch, objective_for
from megatfm.verify.traffic import TrafficCounter

ENGINES = ("native", "deepspeed")
PRESET = "gpt2-124m"
SMALL = [
    *("model.d_model=256", "model.n_layers=6", "model.attention.n_heads=8", "model.ffn.d_ff=1024"),
    *("model.vocab_size=8192", "model.dropout=0", "model.attention.dropout=0", "data.sequence_length=256"),
    *("data.tokenizer=none", "data.train=none", "optimizer.name=adamw", "train.micro_batch=2", "train.compile=false"),
]
"""Sizes that a CPU can do. With --set, anything else."""
CASES: dict[str, list[str]] = {
    **{f"fp32, zero {stage}": ["train.precision=fp32", f"parallel.zero={stage}"] for stage in (0, 1, 2, 3)},
    **{f"bf16, zero {stage}": ["train.precision=bf16", f"parallel.zero={stage}"] for stage in (2, 3)},
}
OFFLOADED = "deepspeed.offload_optimizer=cpu"
PLACES = ("none", "cpu", "nvme")
BLOCK = 2**20


@dataclass(frozen=True)
class Job:
    """Work of the processes: steps of these configs in turns."""

    configs: dict[str, Config]
    ranks: int
    rounds: int
    device: str
    store: str


def load_case(engine: str, words: Sequence[str], ranks: int) -> Config:
    """Load the config as the command line does; each rank has two micro-batches."""
    layout = [f"parallel.engine={engine}", f"parallel.dp_shard={ranks}", f"train.global_batch={4 * ranks}"]
    return load_config(PRESET, [*SMALL, *layout, *words])


def make_step(config: Config, job: Job, rank: int) -> tuple[Engine, Callable[[], Any]]:
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    engine = build_engine(config, build_mesh(config.parallel, job.ranks, job.device), device, config.train.precision)
    objective, rows = objective_for(config), draw_batch(config)
    first, micro_batch = engine.mesh.data_rank * 4, config.train.micro_batch
    batches = [{k: v[i : i + micro_batch] for k, v in rows.items()} for i in range(first, first + 4, micro_batch)]

    def step() -> None:
        engine.forward_backward(batches, objective)
        engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)

    return engine, step


def read_peak_memory(device: str) -> int:
    """Return the peak memory in bytes since `reset_peak_memory`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else common.read_memory("VmHWM")


def reset_peak_memory(device: str) -> None:
    (torch.cuda.reset_peak_memory_stats if device == "cuda" else common.reset_peak_memory)()


def count_file_bytes() -> Counter[str]:
    """Count from now on the bytes that this process reads from and writes to DeepSpeed's files."""
    files = importlib.import_module("megatfm.engines.deepspeed.nvme_offload")
    genuine, moved = files.SyncIOHandle._transfer, Counter[str]()

    def counted(self: Any, call: Any, flags: int, buffer: torch.Tensor, *where: Any) -> int:
        moved["bytes"] += buffer.nbytes
        return int(genuine(self, call, flags, buffer, *where))

    files.SyncIOHandle._transfer = counted
    return moved


def run_rank(rank: int, job: Job, answers: Any) -> None:
    """Run a rank; answer with figures by name and round, peak memory of all, and bytes sent in a step by name."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(job.store, job.ranks), rank=rank, world_size=job.ranks)
    reset_peak_memory(job.device)
    files = count_file_bytes()
    before, sent = read_peak_memory(job.device), {}
    steps: dict[str, Callable[[], Any]] = {}
    for name, config in job.configs.items():
        engine, steps[name] = make_step(config, job, rank)
        steps[name]()
        with TrafficCounter(engine.process_groups()) as traffic:
            steps[name]()
        sent[name] = sum(flow.sent_bytes for flow in traffic.list_traffic())

    def measure_step(name: str) -> dict[str, float]:
        def step() -> None:
            steps[name]()
            if job.device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()

        dist.barrier()
        files.clear()
        return {**common.make_side(step)(), "bytes": files["bytes"]}

    calls = {name: functools.partial(measure_step, name) for name in steps}
    answers[rank] = common.take_turns(calls, job.rounds), read_peak_memory(job.device) - before, sent
    steps.clear()
    del engine
    gc.collect()  # engines, while they can still ask who they are
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(configs: dict[str, Config], args: argparse.Namespace, rounds: int) -> dict[int, Any]:
    """Return the answers of `run_rank` by rank."""
    with TemporaryDirectory() as folder, mp.Manager() as manager:
        answers = manager.dict()
        job = Job(configs, args.ranks, rounds, args.device, f"{folder}/store")
        mp.start_processes(run_rank, (job, answers), nprocs=args.ranks, start_method="forkserver")
        return dict(answers)


def measure_memory(name: str, config: Config, args: argparse.Namespace) -> str:
    """Return the peak memory of each rank in MB, of processes that run nothing else."""
    answers = run_ranks({name: config}, args, 2)
    return ", ".join(f"{answers[rank][1] / 1e6:,.0f}" for rank in range(args.ranks))


def measure_case(case: str, words: Sequence[str], offloaded: Sequence[str], args: argparse.Namespace) -> str:
    extra = {"native": [], "deepspeed": list(offloaded)}
    configs = {name: load_case(name, [*words, *extra[name], *args.set], args.ranks) for name in ENGINES}
    steps, _, sent = run_ranks(configs, args, args.rounds)[0]
    pairs = list(zip(steps["deepspeed"], steps["native"], strict=True))
    ratios = common.summarize(
        {clock: [theirs[clock] / ours[clock] for theirs, ours in pairs] for clock in common.CLOCKS}
    )
    memory = " / ".join(measure_memory(name, configs[name], args) for name in ENGINES)
    sent_mb = " / ".join(f"{sent[name] / 1e6:,.1f}" for name in ENGINES)
    return (
        f"| {case} | **{ratios['wall']:.2f}** ({ratios['wall_lowest']:.2f} – {ratios['wall_highest']:.2f}) | "
        f"{ratios['cpu']:.2f} | {memory} | {sent_mb} |"
    )


def measure_disk(folder: Path) -> float:
    """Return the bytes a second of a folder's disk alone, half written and half read."""
    path, block, number = folder / "plain", mmap.mmap(-1, BLOCK), 256
    start = time.perf_counter()
    for flags, move in ((os.O_CREAT | os.O_WRONLY, os.writev), (os.O_RDONLY, os.readv)):
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        for _ in range(number):
            move(descriptor, [block])
        os.close(descriptor)
    seconds = time.perf_counter() - start
    path.unlink()
    return 2 * number * BLOCK / seconds


def add_offloading(page: common.Page, args: argparse.Namespace) -> None:
    words = ["train.precision=fp32", "parallel.zero=3", f"deepspeed.nvme_path={args.offload}"]
    kinds = "deepspeed.offload_optimizer", "deepspeed.offload_parameters"
    configs = {
        place: load_case("deepspeed", [*words, *(f"{kind}={place}" for kind in kinds), *args.set], args.ranks)
        for place in PLACES
    }
    steps = run_ranks(configs, args, args.rounds)[0][0]
    disk_speed = measure_disk(args.offload)
    elements = sum(p.numel() for p in build(configs["none"].model).parameters()) // args.ranks
    table = (
        "| Stage 3, optimizer and parameters | step / none | MB moved a step and rank | MB/s and rank | MB by rank |"
    )
    page.add(table=table)
    for place in PLACES:
        seconds, plain = ([step["wall"] for step in steps[name]] for name in (place, "none"))
        ratio = common.compute_median_ratio(seconds, plain)
        longer = statistics.median(a - b for a, b in zip(seconds, plain, strict=True))
        moved = {"none": 0, "cpu": 8 * elements}.get(place, statistics.median(step["bytes"] for step in steps[place]))
        speed = f"{moved / longer / 1e6:,.0f}" if moved and longer > 0 else "–"
        memory = measure_memory(place, configs[place], args)
        page.add(f"| {place} | {ratio:.2f} | {moved / 1e6:,.1f} | {speed} | {memory} |")
    page.add("", f"The disk by itself, one process: {disk_speed / 1e6:,.0f} MB/s.")


@common.argument("--ranks", type=int, default=2)
@common.argument("--rounds", type=int, default=10)
@common.argument("--device", choices=["cpu", "cuda"], default="cpu")
@common.argument("--cases", nargs="*", default=[*CASES, "fp32, zero 2, offloaded"])
@common.argument("--set", nargs="*", default=[], help="settings of both that are not the defaults")
@common.argument("--offload", type=Path, help="a folder on a local disk: measure offloading, too")
@common.argument("--out", type=common.make_output_file)
def main(args: argparse.Namespace) -> None:
    os.environ["DS_ACCELERATOR"] = args.device
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["deepspeed", "megatfm.train.build", "megatfm.verify.shrink"])

    settings = ", " + " ".join(args.set) if args.set else ""
    page = common.Page(
        args.out,
        "Native against DeepSpeed",
        f"torch {torch.__version__}, DeepSpeed {version('deepspeed')}, {args.ranks} ranks on {args.device}, "
        f"{args.rounds} rounds{settings}, load of the machine's {os.cpu_count()} cores by others at the start: "
        f"{os.getloadavg()[0]:.1f}; `python benchmarks/engines.py`, whose head says how it is measured.",
    )
    if args.cases:
        heads = "clock (lowest – highest) | CPU | MB by rank, native / DeepSpeed | MB sent a step |"
        page.add(table=f"| | DeepSpeed / native, {heads}")
    for case in args.cases:
        name = case.removesuffix(", offloaded")
        page.add(measure_case(case, CASES[name], [OFFLOADED] if name != case else [], args))
    if args.offload:
        args.offload.mkdir(parents=True, exist_ok=True)
        add_offloading(page, args)


if __name__ == "__main__":
    common.run_script(__doc__, main)
