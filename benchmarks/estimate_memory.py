"""Modelled peak memory: against executed ranks, and against ranks traced on the imaginary GPU.

    OMP_NUM_THREADS=1 python benchmarks/estimate_memory.py executed > benchmarks/results/DATE-estimate-memory.md
    python benchmarks/estimate_memory.py traced walk.jsonl [--shard 0/2]   # resumes: recorded layouts are skipped
    python benchmarks/estimate_memory.py traced walk.jsonl --table >> docs/internals/imaginary-walk.md

executed: small models of each family train in float32 by gloo on this machine's CPU, each layout on as many processes
as it has ranks; each row is one document. An allocator of torch's tensors counts their bytes (`counting_allocator.cpp`,
built with g++ at each start); the peak is that of the second step, which has the optimizer's state, and of the fullest
rank. torch's profiler does not serve: it misses what gloo's threads free. The estimate is of `--device`, without what
it reserves.

traced: a recommended layout of every preset, tabulated beside the estimate. `walk.jsonl` gets one line a layout.
`tests/unit/imaginary/test_walk.py` asserts the same quantities.
"""

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatfm.config import Config, load_config
from megatfm.data.loader import without_documents
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.imaginary.step import make_batches
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.verify.shrink import objective_for
from tests.support.recommended_layouts import Recommended, TracedLayout, recommended, traced_layout

# ------------------------------------------------------------------------------------------------ executed

TEXT = ["model.n_layers=3", "model.vocab_size=4096", "data.sequence_length=512", "train.micro_batch=2"]
WIDTH = ["model.d_model=256", "model.attention.n_heads=4", "model.ffn.d_ff=1024"]
FAMILIES = {
    "gpt2-124m": [*TEXT, *WIDTH],
    "llama3-8b": [*TEXT, *WIDTH, "model.attention.n_kv_heads=2", "model.attention.head_dim=64"],
    "olmoe-1b-7b": [*TEXT, *WIDTH, "model.ffn.d_ff=256", "model.ffn.n_experts=8", "model.ffn.top_k=2"],
    "bert-base": [*TEXT, *WIDTH],
    "t5-base": [*TEXT, *WIDTH, "model.attention.head_dim=64", "model.n_encoder_layers=3", "data.target_length=512"],
    "vit-ti16": ["model.n_layers=3", "train.micro_batch=8"],
}
"""Preset → overrides of its small model."""
MICROBATCHES = 2
CASES = (
    ("gpt2-124m", 2, "parallel.zero=0"),
    ("gpt2-124m", 2, "parallel.zero=1"),
    ("gpt2-124m", 2, "parallel.tp=2"),
    ("gpt2-124m", 2, "parallel.pp=2"),
    ("llama3-8b", 2, "parallel.zero=1"),
    ("llama3-8b", 2, "parallel.zero=2 parallel.grad_accumulation=sharded"),
    ("llama3-8b", 2, "parallel.zero=3"),
    ("llama3-8b", 2, "parallel.zero=3 train.recompute=full"),
    ("olmoe-1b-7b", 2, "parallel.zero=1"),
    ("olmoe-1b-7b", 4, "parallel.zero=3 parallel.ep=2"),
    ("bert-base", 2, "parallel.zero=1"),
    ("bert-base", 2, "parallel.zero=3"),
    ("t5-base", 2, "parallel.zero=0"),
    ("t5-base", 2, "parallel.tp=2"),
    ("vit-ti16", 2, "parallel.zero=0"),
    ("vit-ti16", 2, "parallel.zero=3"),
    ("gpt2-124m", 2, "parallel.zero=1 train.compile=true"),
    ("llama3-8b", 2, "parallel.zero=3 train.compile=true"),
    ("olmoe-1b-7b", 2, "parallel.zero=1 train.compile=true"),
    ("bert-base", 2, "parallel.zero=1 train.compile=true"),
    ("vit-ti16", 2, "parallel.zero=0 train.compile=true"),
)


def make_config(preset: str, ranks: int, layout: str) -> Config:
    """The small model in a layout, with two micro-batches."""
    words = [*FAMILIES[preset], *layout.split(), "train.precision=fp32", "train.device=cpu"]
    words += [f"model.{key}dropout=0" for key in ("", "attention.", "ffn.")]  # with it, a CPU computes all scores
    words += ["data.train=d", "data.tokenizer=t"] if preset != "vit-ti16" else []
    config = load_config(preset, [*words, "parallel.dp_shard=-1", "train.global_batch=1024"])
    parallel = config.parallel
    data_ranks = ranks // (parallel.tp * parallel.pp)
    rows = MICROBATCHES * config.train.micro_batch * data_ranks
    return config.with_changes({"parallel.dp_shard": data_ranks, "train.global_batch": rows})


def build_allocator(folder: str) -> Path:
    library, torch_folder = Path(folder, "counting_allocator.so"), Path(torch.__file__).parent
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{torch_folder}/include"]
    command += [str(Path(__file__).with_name("counting_allocator.cpp")), "-o", str(library)]
    command += [f"-L{torch_folder}/lib", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(command, check=True)
    return library


def load_allocator(library: Path) -> ctypes.CDLL:
    """Have torch allocate by it from now on."""
    allocator = ctypes.CDLL(str(library))
    for function in (allocator.live_bytes, allocator.peak_bytes):
        function.restype = ctypes.c_long
    allocator.install()
    return allocator


def measure_rank(rank: int, ranks: int, preset: str, layout: str, folder: str, library: Path) -> None:
    """Take two steps as one rank, and write the most bytes that were allocated at once in the second."""
    torch.set_num_threads(1)
    allocator = load_allocator(library)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    config = make_config(preset, ranks, layout)
    mesh = build_mesh(config.parallel, ranks, "cpu")
    already = allocator.live_bytes()
    engine = build_engine(config, mesh, torch.device("cpu"), config.train.precision)
    drawn = [
        without_documents({name: torch.as_tensor(field).numpy() for name, field in batch.items()})
        for batch in make_batches(config, mesh.data_ranks, None)
    ]
    batches = [{name: torch.from_numpy(field).clone() for name, field in batch.items()} for batch in drawn]
    objective = objective_for(config)
    for _ in range(2):
        allocator.reset_peak()
        engine.forward_backward(batches, objective)
        engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
    Path(folder, f"{rank}").write_text(str(allocator.peak_bytes() - already))
    dist.barrier()
    dist.destroy_process_group()


def measure(preset: str, ranks: int, layout: str, library: Path) -> int:
    """Bytes of the fullest executed rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ranks, preset, layout, folder, library
        torch.multiprocessing.start_processes(measure_rank, arguments, nprocs=ranks, start_method="fork")
        return max(int(Path(folder, f"{rank}").read_text()) for rank in range(ranks))


def model(preset: str, ranks: int, layout: str, device: str) -> int:
    """Modelled bytes of the fullest rank, without those that the device reserves."""
    with open_estimator(make_config(preset, ranks, layout), load_cluster(device, ranks)) as opened:
        worst = opened.estimate(opened.base).worst
    return worst.total - worst.reserved


@common.argument("--only", nargs="*", help="presets to run")
@common.argument("--device", default="h100", help="device of the estimate (h100)")
def run_executed(args: argparse.Namespace) -> None:
    command = f"OMP_NUM_THREADS=1 python benchmarks/estimate_memory.py executed --device {args.device}"
    print("# Modelled and executed peak memory\n")
    print(f"MB of the fullest rank, {common.today()}: `{command}`.\n")
    print("| Small model of | ranks | layout | executed | modelled | error |\n|---|---|---|---|---|---|", flush=True)
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        library = build_allocator(folder)
        for preset, ranks, layout in CASES:
            if args.only and preset not in args.only:
                continue
            executed = measure(preset, ranks, layout, library)
            modelled = model(preset, ranks, layout, args.device)
            errors.append(abs(modelled / executed - 1))
            cells = [preset, ranks, layout.replace("parallel.", ""), f"{executed / 1e6:.1f}", f"{modelled / 1e6:.1f}"]
            print(f"| {' | '.join(map(str, cells))} | {100 * (modelled / executed - 1):+.1f} % |", flush=True)
    print(f"\n{len(errors)} configs: median error {100 * median(errors):.1f} %, ", end="")
    print(f"largest {100 * max(errors):.1f} %. torch {torch.__version__}.")


# ------------------------------------------------------------------------------------------------ traced


def make_name(layout: Recommended) -> str:
    """Return the name of a layout: its preset, and its row length where that is not the preset's."""
    length = next((x for x in layout.overrides if x.startswith("data.sequence_length=")), "")
    return " ".join([layout.preset, *([f"rows of {int(length.partition('=')[2]):,}"] if length else [])])


def trace(layout: Recommended) -> dict[str, Any]:
    """Trace one layout. Returns a JSON object; `error` where the estimate or the trace failed."""
    start = time.perf_counter()
    row: dict[str, Any] = {"name": make_name(layout), "gpus": layout.gpus, "overrides": list(layout.overrides)}
    try:
        traced = traced_layout(layout)
    except Exception as error:  # a crash is a result, too
        return {**row, "error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - start}
    return {**row, **describe_trace(traced), "seconds": time.perf_counter() - start}


def describe_trace(traced: TracedLayout) -> dict[str, Any]:
    """Return what a table says of a traced layout."""
    facts = traced.traced.facts
    described = {
        "layout": facts["layout"],
        "differences": traced.differences,
        "traced_peak": traced.traced.peak,
        "waits": traced.waits,
        "microbatches": facts["microbatches"],
        "all_pairs": facts["all_pairs"],
    }
    if traced.full is not None:
        described["fits"] = traced.full.fits
        described["full_share"] = traced.full.worst.total / traced.full.cluster.device.memory_bytes
    return described


def compute_error(row: dict[str, Any], quantity: str) -> float | None:
    """Return the relative error of "peak" or "saved by blocks"; None where the model is traced alone."""
    pairs = {name: (modelled, traced) for name, modelled, traced in row.get("differences", [])}
    return pairs[quantity][0] / pairs[quantity][1] - 1 if quantity in pairs else None


def compute_traffic_error(row: dict[str, Any]) -> float | None:
    """Return the largest relative error of traffic by axis and collective, of flows of a mebibyte or more."""
    flows = [
        (a, b) for name, a, b in row.get("differences", []) if name not in ("peak", "saved by blocks", "stored weights")
    ]
    return max((abs(a - b) / max(a, b) for a, b in flows), default=0.0) if row.get("differences") else None


def format_percent(share: float | None, digits: int = 1, sign: str = "") -> str:
    """Format a share for a narrow cell, as 12.5 %; with sign "+" as +1.9 %, −0.1 % or 0.0 %."""
    if share is None:
        return "–"
    percent = round(100 * share, digits)
    text = f"{percent:{sign if percent else ''}.{digits}f}".replace("-", "−" if percent else "")
    return f"{text}\u00a0%"


def format_layout(layout: str) -> str:
    """Leave out axes of one rank, as "dp_replicate 1 × "."""
    sizes, comma, experts = layout.partition(",")
    return " × ".join(axis for axis in sizes.split(" × ") if not axis.endswith(" 1")) + comma + experts


def format_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, with a summary above it."""
    errors = [abs(error) for row in rows if (error := compute_error(row, "peak")) is not None]
    yield (
        f"{len(rows)} layouts, {sum('error' in row for row in rows)} failed. Error of the modelled peak: median "
        f"{format_percent(median(errors))}, 90 % of layouts below "
        f"{format_percent(sorted(errors)[int(0.9 * (len(errors) - 1))])}, largest {format_percent(max(errors))}. "
        f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes in all."
    )
    yield ""
    columns = ["Preset", "GPUs", "Layout", "Memory used", "Error of peak", "Saved by blocks", "Error of traffic"]
    columns += ["Host waits a step", "All pairs"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in sorted(rows, key=lambda row: str(row["name"])):
        cells = [row["name"], f"{row['gpus']:,}"]
        if "error" in row:
            yield f"| {' | '.join(cells)} | **{row['error']}** | | | | | | |"
            continue
        peak, saved = compute_error(row, "peak"), compute_error(row, "saved by blocks")
        traffic = compute_traffic_error(row)
        waits = ", ".join(f"{times} `{path}`" for path, times in row["waits"].items())
        cells += [
            format_layout(row["layout"]),
            format_percent(row.get("full_share"), 0),
            format_percent(peak, sign="+"),
            format_percent(saved, sign="+"),
            format_percent(traffic, 2),
            waits or "none",
            ", ".join(row["all_pairs"]) or "none",
        ]
        yield f"| {' | '.join(cells)} |"


@common.argument("results", type=Path)
@common.argument("--shard", default="0/1", help="I/N: every N-th layout, from the I-th on")
@common.argument("--only", nargs="*", help="presets to trace")
@common.argument("--table", action="store_true", help="print the table of recorded results")
def run_traced(args: argparse.Namespace) -> None:
    rows = common.read_rows(args.results) if args.results.exists() else []
    if args.table:
        print("\n".join(format_table(rows)))
        return
    recorded = {row["name"] for row in rows}
    index, n_shards = map(int, args.shard.split("/"))
    for layout in recommended()[index::n_shards]:
        if make_name(layout) in recorded or (args.only is not None and layout.preset not in args.only):
            continue
        with args.results.open("a") as file:
            file.write(json.dumps(trace(layout)) + "\n")


PARTS = {"executed": run_executed, "traced": run_traced}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
