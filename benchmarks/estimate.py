"""Estimated times of steps, against this machine's and against published runs; how long a search takes.

    OMP_NUM_THREADS=1 python benchmarks/estimate.py calibrate --rounds 10
    python benchmarks/estimate.py published > benchmarks/results/DATE-estimate-published.md
    OMP_NUM_THREADS=1 python benchmarks/estimate.py search > benchmarks/results/DATE-estimate-search.md

calibrate: how well a calibrated table tells times of products and of whole steps whose shapes are not in it, on this
machine. Those of the table and held-out ones are measured in turns, in CPU seconds. Steps are the engine's, passes and
update. The table is that of `megatfm estimate PRESET --calibrate`.

published: row by row with the error of each. PTD-P: Narayanan et al. 2021 (arXiv 2104.04473), table 1, on Selene (DGX
A100 80 GB). Llama 3 405B: Grattafiori et al. 2024 (arXiv 2407.21783), table 4, on H100 at 700 W. The last column sets
the device's rate of products so that the first row comes out; the other rows are predicted with it.

What a paper does not tell is set so: PTD-P's micro-batch and number of virtual stages are those that the estimate takes
for fastest among 1, 2, 4, 8 and 1f1b, interleaved 2 to 5. Its attention was not fused: what reading and writing the
scores takes is added by a closed form (`compute_unfused_seconds`). Its FLOP/s count recomputation (its equation 3);
Llama's MFU does not.

search: CPU seconds of `megatfm estimate --search` on one H100 cluster after another, imports left out.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from statistics import median

import common
import torch

from megatfm.config import Config, load_config
from megatfm.config.section import list_divisors
from megatfm.errors import UsageError
from megatfm.estimate.calibrate import (
    DTYPES,
    keep_kernels,
    list_matmul_shapes,
    make_matmul,
    measure_device,
    write_table,
)
from megatfm.estimate.clock import Clock
from megatfm.estimate.devices import NODE, Cluster, load_cluster
from megatfm.estimate.estimator import Estimate, Estimator, open_estimator
from megatfm.estimate.roofline import interpolate_rate
from megatfm.estimate.search import search
from megatfm.estimate.trial_configs import list_trials

# ------------------------------------------------------------------------------------------------ calibrate

STEPS = (
    # layers, width, heads, rows, tokens of a row
    (2, 256, 4, 2, 128), (3, 320, 5, 1, 256), (1, 512, 8, 2, 256), (2, 384, 6, 2, 192), (4, 192, 3, 2, 256),
    (2, 640, 10, 1, 128), (1, 256, 4, 2, 512), (2, 448, 7, 1, 256), (3, 288, 6, 2, 128), (1, 576, 9, 1, 384),
    (2, 352, 11, 2, 224), (5, 240, 5, 1, 160), (2, 304, 4, 2, 320), (1, 704, 11, 1, 192),
)  # fmt: skip
"""Shapes of held-out steps."""
SMALL_LLAMA = [
    "model.d_model=768", "model.attention.n_heads=12", "model.attention.n_kv_heads=1", "model.ffn.d_ff=3072",
]  # fmt: skip
FAMILIES = {"gpt2-124m": ["model.dropout=0"], "llama3-8b": SMALL_LLAMA}
SETTINGS = ["model.vocab_size=2048", "train.device=cpu", "parallel.zero=0", "train.compile=false"]


def draw_shapes(count: int, seed: int) -> list[tuple[int, int, int]]:
    """Draw shapes, of multiples of 16, between the smallest and the largest of the table's sizes."""
    draw, largest, shapes = random.Random(seed), max(map(prod, list_matmul_shapes("cpu"))), list[tuple[int, int, int]]()
    while len(shapes) < count:
        m, n, k = (16 * round(2 ** draw.uniform(6, 11) / 16) for _ in range(3))
        if m * n * k <= largest:
            shapes.append((m, n, k))
    return shapes


def measure_products(precision: str, rounds: int, count: int) -> None:
    device, known, held_out = torch.device("cpu"), list_matmul_shapes("cpu"), draw_shapes(count, 3)
    functions = [make_matmul(shape, DTYPES[precision], device) for shape in (*known, *held_out)]
    seconds = Clock(device).measure(functions, rounds)
    table = [[*shape, t] for shape, t in zip(known, seconds, strict=False)]
    measured = zip(held_out, seconds[len(known) :], strict=True)
    errors = [2 * prod(shape) / interpolate_rate(table, *shape) / elapsed - 1 for shape, elapsed in measured]
    sizes = sorted(map(abs, errors))
    print(
        f"{precision}: {len(known)} products in the table, {count} held out: error {100 * median(errors):+.1f} % in "
        f"the median, without sign {100 * median(sizes):.1f} %, ninth decile {100 * sizes[int(0.9 * count)]:.1f} %, "
        f"worst {100 * max(errors, key=abs):+.0f} %"
    )


def make_step(preset: str, precision: str, shape: tuple[int, int, int, int, int]) -> Config:
    """Return the config of a small step of a family."""
    layers, width, heads, rows, tokens = shape
    sizes = {
        "model.n_layers": layers, "model.d_model": width, "model.attention.n_heads": heads, "model.ffn.d_ff": 4 * width,
        "train.micro_batch": rows, "train.global_batch": rows, "data.sequence_length": tokens,
        "train.precision": precision,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in sizes.items()]
    return load_config(preset, [*FAMILIES[preset], *SETTINGS, *overrides])


def measure_steps(preset: str, precision: str) -> None:
    """Print measured and estimated seconds of held-out steps: the preset's trials give the table."""
    trials = list_trials(load_config(preset, FAMILIES[preset]), "cpu", precision)
    held_out = [make_step(preset, precision, shape) for shape in STEPS]
    table, times = measure_device(Clock(torch.device("cpu")), precision, trials, held_out)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.toml"
        write_table(table, path)
        cluster = load_cluster(NODE, 1, hardware=path)
    errors = []
    for shape, trial in zip(STEPS, times.held_out, strict=True):
        with open_estimator(trial.config, cluster) as opened:
            estimated = opened.estimate(opened.base).time.step
        errors.append(estimated / trial.step - 1)
        sizes = " | ".join(map(str, shape))
        print(
            f"| {preset} | {precision} | {sizes} | {1e3 * trial.step:.1f} | {1e3 * estimated:.1f} | "
            f"{100 * errors[-1]:+.1f} % |"
        )
    print(
        f"{preset} in {precision}: error {100 * median(errors):+.1f} % in the median, without sign "
        f"{100 * median(map(abs, errors)):.1f} %, worst {100 * max(errors, key=abs):+.1f} %",
        flush=True,
    )


@common.argument("--rounds", type=int, default=10)
@common.argument("--held-out", type=int, default=40)
@common.argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
def run_calibrate(args: argparse.Namespace) -> None:
    keep_kernels()
    for precision in args.precision:
        measure_products(precision, args.rounds, args.held_out)
    for preset, precision in product(FAMILIES, args.precision):
        measure_steps(preset, precision)


# ------------------------------------------------------------------------------------------------ published

SCORE_PASSES = 18
"""Times that scores are read or written: 5 in a forward pass, which recomputation repeats, and 8 in a backward pass."""


@dataclass(frozen=True)
class Row:
    """A published run. tflops: of a GPU."""

    name: str
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: float


PTD_P = (
    Row("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    Row("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    Row("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    Row("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    Row("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    Row("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Row("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    Row("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    Row("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    Row("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
LLAMA = (
    ("8,192 GPUs, rows of 8,192", 8192, ["parallel.pp=16", "train.global_batch=2048"], 430),
    ("16,384 GPUs, rows of 8,192", 16384, ["parallel.pp=16", "train.global_batch=2048"], 400),
    (
        "16,384 GPUs, rows of 131,072, cp 16",
        16384,
        ["parallel.pp=16", "parallel.cp=16", "train.global_batch=128", "data.sequence_length=131072"],
        380,
    ),
)


def make_gpt_config(row: Row) -> Config:
    words = [
        *(f"model.d_model={row.width}", f"model.n_layers={row.layers}", f"model.ffn.d_ff={4 * row.width}"),
        *(f"model.attention.n_heads={row.heads}", f"model.attention.head_dim={row.width // row.heads}"),
        *("model.attention.pattern.name=full", "model.vocab_size=51200", "data.sequence_length=2048"),
        *(f"parallel.tp={row.tp}", f"parallel.pp={row.pp}", "parallel.dp_shard=-1", "parallel.zero=0"),
        *(f"train.global_batch={row.batch}", "train.micro_batch=1", "train.recompute=full"),
        "parallel.sequence_parallel=false",
    ]
    return load_config("gpt3-xl", words)


def iter_variants(row: Row) -> Iterator[dict[str, object]]:
    for micro_batch in (1, 2, 4, 8):
        yield {"train.micro_batch": micro_batch}
        for virtual in (2, 3, 4, 5) if row.pp > 1 else ():
            schedule = {"parallel.pp_schedule": "interleaved", "parallel.virtual_stages": virtual}
            yield {"train.micro_batch": micro_batch, **schedule}


def compute_unfused_seconds(row: Row, estimate: Estimate) -> float:
    """Return the time in which scores [rows, heads, T, T] in 16 bits pass through memory."""
    train, device = estimate.config.train, estimate.cluster.device
    scores = train.micro_batch * row.heads // row.tp * 2048**2 * 2
    layers = row.layers / row.pp * estimate.microbatches
    return layers * SCORE_PASSES * scores / (device.memory_bandwidth * device.memory_efficiency)


def compute_published_flops(row: Row) -> float:
    """Return the FLOPs of a step by the paper's equation 3, with recomputation."""
    s, v, h, n = 2048, 51200, row.width, row.layers
    return 96 * row.batch * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))


def find_fastest(opened: Estimator, row: Row) -> tuple[float, Estimate] | None:
    """Return the variant with the shortest step among those that fit."""
    variants: list[tuple[float, Estimate]] = []
    for changes in iter_variants(row):
        try:
            estimate = opened.estimate(opened.base.with_changes(changes))
        except (UsageError, ValueError):
            continue
        if estimate.fits:
            variants.append((estimate.time.step + compute_unfused_seconds(row, estimate), estimate))
    return min(variants, key=lambda pair: pair[0], default=None)


def calibrate_cluster(cluster: Cluster, row: Row, measured: float) -> float:
    """Return the efficiency of products with which a row comes out as measured, by bisection."""
    low, high = 0.3, 1.0
    with open_estimator(make_gpt_config(row), cluster) as opened:
        for _ in range(12):
            middle = (low + high) / 2
            opened.cluster = scale_efficiency(cluster, middle)
            best = find_fastest(opened, row)
            assert best is not None
            if compute_published_flops(row) / best[0] / row.gpus / 1e12 < measured:
                low = middle
            else:
                high = middle
    return (low + high) / 2


def scale_efficiency(cluster: Cluster, share: float) -> Cluster:
    """Return a cluster whose devices multiply at another share of their peak."""
    return replace(cluster, device=replace(cluster.device, matmul_efficiency=share))


def add_ptd_p(page: common.Page) -> None:
    """Add table 1 of PTD-P, as is and with the rate of its first row."""
    share = calibrate_cluster(load_cluster("a100", PTD_P[0].gpus), PTD_P[0], PTD_P[0].tflops)
    ours = f"as is | error | rate of row 1 ({share:.3f}) | error"
    page.add(table=f"| PTD-P, table 1 | GPUs | layout | published | {ours} |")
    errors: tuple[list[float], list[float]] = [], []
    for row in PTD_P:
        cluster, cells, layout = load_cluster("a100", row.gpus), [], ""
        with open_estimator(make_gpt_config(row), cluster) as opened:
            for its_errors, opened.cluster in zip(errors, (cluster, scale_efficiency(cluster, share)), strict=True):
                best = find_fastest(opened, row)
                if best is None:
                    cells.append("does not fit | ")
                    continue
                tflops = compute_published_flops(row) / best[0] / row.gpus / 1e12
                its_errors.append(tflops / row.tflops - 1)
                cells.append(f"{tflops:.0f} | {100 * its_errors[-1]:+.1f} %")
                layout = format_layout(row, best[1])
        page.add(f"| {row.name} | {row.gpus:,} | {layout} | {row.tflops} | {' | '.join(cells)} |")
    for name, shown in zip(("As is", "Rate of row 1, the nine others"), (errors[0], errors[1][1:]), strict=True):
        sizes = list(map(abs, shown))
        page.add("", f"{name}: median error {100 * median(sizes):.1f} %, largest {100 * max(sizes):.1f} %.")


def format_layout(row: Row, estimate: Estimate) -> str:
    """Format a row's layout, and what was chosen of it."""
    parallel = estimate.config.parallel
    virtual = f" × {parallel.stages_per_rank} stages" if parallel.stages_per_rank > 1 else ""
    return f"tp {row.tp}, pp {row.pp}{virtual}, micro-batch {estimate.config.train.micro_batch}"


def add_llama(page: common.Page) -> None:
    """Add table 4 of Llama 3; stages, which the paper gives, are interleaved, ZeRO 2 keeps gathered weights."""
    page.add(table="| Llama 3 405B, table 4 | published | as is | error |")
    plain = ["parallel.tp=8", "parallel.dp_shard=-1", "parallel.zero=2", "train.micro_batch=1"]
    plain += ["parallel.grad_accumulation=unsharded", "parallel.pp_schedule=interleaved"]
    for name, gpus, overrides, published in LLAMA:
        with open_estimator(load_config("llama3-405b", [*plain, *overrides]), load_cluster("h100", gpus)) as opened:
            estimate = opened.estimate(opened.base)
        tflops = estimate.mfu[0] * estimate.cluster.device.peak("bf16") / 1e12
        error = 100 * (tflops / published - 1)
        page.add(f"| {name} | {published} | {tflops:.0f} | {error:+.1f} % |")


def run_published(args: argparse.Namespace) -> None:
    how = "`python benchmarks/estimate.py published`; what papers leave open, see its head"
    page = common.Page(None, "Estimates against published runs", f"TFLOP/s a GPU: {how}.")
    add_ptd_p(page)
    add_llama(page)


# ------------------------------------------------------------------------------------------------ search

SEARCHES = (
    ("llama3-8b", 16), ("llama3-8b", 64), ("olmoe-1b-7b", 16), ("olmoe-1b-7b", 32), ("olmoe-1b-7b", 64),
    ("olmoe-1b-7b", 128), ("olmoe-1b-7b", 256), ("qwen3-30b-a3b", 64), ("deepseek-v3", 256),
)  # fmt: skip
"""Presets and GPUs. OLMoE's have 1, 2.1, 4, 6.4 and 9.2 times as many candidates."""


@common.argument("--only", nargs="*", help="presets to search layouts of")
def run_search(args: argparse.Namespace) -> None:
    page = common.Page(
        None,
        "Searching for a layout",
        "CPU seconds on one core, imports left out: `OMP_NUM_THREADS=1 python benchmarks/estimate.py search`.",
        table="| Preset | GPUs | layouts | refused | fit | CPU seconds | ms a layout |",
    )
    for preset, gpus in (case for case in SEARCHES if not args.only or case[0] in args.only):
        cluster = load_cluster("h100", gpus)
        tp_sizes = [size for size in list_divisors(gpus) if size <= cluster.node.gpus]
        with open_estimator(load_config(preset), cluster, tp_sizes) as opened:
            start = time.process_time()
            result = search(opened)
            seconds = time.process_time() - start
        counts = f"{result.tried:,} | {result.refused.total():,} | {result.n_fit:,}"
        page.add(f"| {preset} | {gpus} | {counts} | {seconds:.1f} | {1e3 * seconds / result.tried:.2f} |")


PARTS = {"calibrate": run_calibrate, "published": run_published, "search": run_search}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
