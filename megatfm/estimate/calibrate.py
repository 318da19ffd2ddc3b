"""Measures the machine at hand: matmuls by shape, memory by bytes, elementwise operators, attention, and the link.

All measurements take turns (`clock`). On a CPU, time is that of this process's threads.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.estimate.clock import Clock
from megatfm.estimate.devices import CALIBRATED_PRECISIONS, GIB, NODE, Device
from megatfm.estimate.kernels import BACKWARD_MATMULS
from megatfm.estimate.trials import (
    TrialTimes,
    fit_overheads,
    fit_to_steps,
    measure_trials,
    tabulate_attention,
    tabulate_matmuls,
    tabulate_operators,
)
from megatfm.tracking.hardware import describe_processor

DTYPES = dict(zip(CALIBRATED_PRECISIONS, (torch.bfloat16, torch.float32), strict=True))
MATMUL_SIZES: Mapping[str, Sequence[int]] = {"cpu": (32, 96, 256, 768, 2048), "cuda": (128, 512, 2048, 8192)}
"""Values of m, n and k of matmuls. All combinations that take less than `MAX_SECONDS` are measured."""
MAX_SECONDS = {"cpu": 0.25, "cuda": 0.05}
EXPECTED_FLOPS = {"cpu": 3e10, "cuda": 3e14}
"""Rates by which matmuls that would take too long are left out."""
MOVED_BYTES: Mapping[str, Sequence[int]] = {
    "cpu": (2**12, 2**16, 2**19, 2**22, 2**25),
    "cuda": (2**12, 2**20, 2**24, 2**28),
}
"""Bytes that an addition in place reads and writes."""
LAYOUTS = ("nt", "nn", "tn")
"""Layouts of matmuls: a linear layer's outputs, its inputs' gradients, and its weights' gradients."""
KERNEL_CACHE, KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", 65_536
"""Variable of oneDNN that tells how many kernels it keeps (1,024 by default; its documentation, "Primitive Cache"), and
more than a calibration runs: one that was dropped takes some 1 ms to build again."""
EXCHANGES = 6
"""Exchanges of each size over a link, of which the fastest counts."""


def measure_device(
    clock: Clock, precision: str, trials: Sequence[Config], held_out: Sequence[Config] = ()
) -> tuple[dict[str, Any], TrialTimes]:
    """Measure this machine and return tables as in `devices.toml` (a device and a node, both called "here"), and steps.

    trials: configs of small steps (`list_trials`); held_out: of steps that are measured and give nothing to the tables.
    """
    keep_kernels()
    device, kind, dtype = clock.device, clock.device.type, DTYPES[precision]
    link = measure_link(kind)  # first, since it may fail
    shapes, sizes = list_matmul_shapes(kind), MOVED_BYTES[kind]
    matmuls = [make_matmul(shape, dtype, device, layout) for layout in LAYOUTS for shape in shapes]
    moves = [_make_in_place_addition(n_bytes, dtype, device) for n_bytes in sizes]
    attention_flops, *attend = _make_attention(dtype, device)
    measurements = [*map(clock.make_cold_measurement, matmuls), *map(clock.make_measurement, (*moves, *attend))]
    times, seconds = measure_trials(trials, clock, held_out, measurements)
    forward_seconds, both_seconds = seconds[-2:]
    forward = attention_flops / forward_seconds
    backward = BACKWARD_MATMULS * attention_flops / max(both_seconds - forward_seconds, 1e-9)
    move_seconds = seconds[len(matmuls) : -2]
    products = _tabulate_products(precision, shapes, seconds[: len(matmuls)], times)
    rate = max(n_bytes / t for n_bytes, t in zip(sizes, move_seconds, strict=True) if n_bytes > 2**20)
    peak = max(forward, *(2 * m * n * k / t for m, n, k, t in products[precision]))
    name, memory = _describe_device(device)
    table: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "memory_gib": round(memory / GIB, 2),
        "flops": {precision: peak},
        "memory_bandwidth": rate,
        "multiprocessors": 1,
        "tile": [1, 1],
        "matmul_efficiency": 1.0,
        "attention_efficiency": forward / peak,
        "attention_backward": backward / forward,
        "memory_efficiency": 1.0,
        "launch_seconds": min(move_seconds),
        "host_seconds": 8e-6 if kind == "cuda" else 0.0,
        "reserved_gib": 2.5 if kind == "cuda" else 0.5,
        "compiles": kind == "cuda",
        "products": products,
        "moves": [list(pair) for pair in zip(sizes, move_seconds, strict=True)],
        "operators": tabulate_operators(times),
        "attention": tabulate_attention(times),
        "source": f"measured by megatfm estimate --calibrate, torch {torch.__version__}",
    }
    if times.trials:
        overheads = fit_overheads(times, Device(key=NODE, **table))
        table |= vars(overheads)
    return {"device": {NODE: table}, "node": {NODE: _describe_node(kind, link)}, "default_node": {NODE: NODE}}, times


def _describe_node(kind: str, link: Mapping[str, Any]) -> dict[str, Any]:
    """Return this machine's table as a node. link: between its processes."""
    return {
        "gpus": max(1, torch.cuda.device_count()) if kind == "cuda" else psutil.cpu_count() or 1,
        "within": link,
        "between": link,
        "disk_bandwidth": 1e9,
        "source": "link measured between processes of this machine; disk assumed",
    }


def _describe_device(device: torch.device) -> tuple[str, int]:
    """Return a device's name and the bytes of its memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return f"{describe_processor()['cpu']}, {torch.get_num_threads()} threads", psutil.virtual_memory().total


def keep_kernels() -> None:
    """Let oneDNN keep all kernels of a calibration, as it keeps those of a run, which has fewer shapes.

    oneDNN reads the variable when it runs its first kernel: after that, and where the user set it, nothing changes.
    """
    os.environ.setdefault(KERNEL_CACHE, str(KERNELS))


def _tabulate_products(
    precision: str, shapes: Sequence[tuple[int, int, int]], seconds: Sequence[float], times: TrialTimes
) -> dict[str, list[list[float]]]:
    """Return rows (m, n, k, seconds) by table: those of trial steps, and of matmuls alone, layout by layout."""
    products = tabulate_matmuls(times)
    for index, layout in enumerate(LAYOUTS):
        measured = seconds[index * len(shapes) : (index + 1) * len(shapes)]
        table_name = precision if layout == "nt" else f"{precision} {layout}"
        rows = [[*shape, t] for shape, t in zip(shapes, measured, strict=True)]
        products[table_name] = products.get(table_name, []) + fit_to_steps(rows, products.get(table_name, []))
    return products


def list_matmul_shapes(kind: str) -> list[tuple[int, int, int]]:
    """Return the shapes (m, n, k) of the matmuls that are measured."""
    triples = itertools.product(MATMUL_SIZES[kind], repeat=3)
    return [(m, n, k) for m, n, k in triples if 2 * m * n * k < MAX_SECONDS[kind] * EXPECTED_FLOPS[kind]]


def make_matmul(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, layout: str = "nt"
) -> Callable[[], object]:
    """Return a function that multiplies x [m, k] by a weight [k, n].

    shape: (m, n, k); layout: see `describe_layouts`.
    """
    m, n, k = shape
    x, weight = (
        torch.full(size if letter == "n" else size[::-1], 0.5, dtype=dtype, device=device)
        for size, letter in zip(((m, k), (k, n)), layout, strict=True)
    )
    left, right = (tensor if letter == "n" else tensor.T for tensor, letter in zip((x, weight), layout, strict=True))
    return lambda: left @ right


def _make_in_place_addition(n_bytes: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    values = torch.ones(n_bytes // 2 // dtype.itemsize, dtype=dtype, device=device)
    return lambda: values.add_(1.0)


def _make_attention(
    dtype: torch.dtype, device: torch.device
) -> tuple[float, Callable[[], object], Callable[[], object]]:
    """Return the FLOPs of a causal attention's forward pass (masked pairs do not count), that pass, and both passes."""
    length, heads, width = (512, 4, 64) if device.type == "cpu" else (4096, 16, 128)
    size = (1, heads, length, width)
    q, k, v = (torch.randn(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_backward() -> None:
        forward().sum().backward()

    return 2 * 2 * heads * width * length * (length + 1) / 2, forward, forward_backward


def measure_link(kind: str) -> dict[str, Any]:
    """Measure bandwidth and latency between processes of this machine: two over gloo, or all GPUs over NCCL."""
    ranks, backend = (
        (2, "gloo") if kind == "cpu" or torch.cuda.device_count() < 2 else (torch.cuda.device_count(), "nccl")
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [
        context.Process(target=_exchange, args=(rank, ranks, backend, store.port, queue)) for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise UsageError(f"--calibrate: processes of this machine can't exchange data over {backend}")
    latency, seconds, n_bytes = queue.get()
    name = f"{backend} between processes of this machine"
    return {"name": name, "bandwidth": n_bytes / max(seconds - latency, 1e-9), "efficiency": 1.0, "latency": latency}


def _exchange(rank: int, ranks: int, backend: str, port: int, queue: Any) -> None:
    """Measure all-gathers of few and of many bytes, in which each rank sends (ranks − 1) shards."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else each rank takes memory for a context on GPU 0, too
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    seconds = []
    for numel in (16, 2**22):
        shard = torch.ones(numel, device=device)
        gathered = [torch.empty_like(shard) for _ in range(ranks)]
        least = float("inf")
        for _ in range(EXCHANGES):
            start = time.perf_counter()
            dist.all_gather(gathered, shard)
            if backend == "nccl":
                torch.cuda.synchronize(device)
            least = min(least, time.perf_counter() - start)
        seconds.append(least)
    if rank == 0:
        queue.put((*seconds, (ranks - 1) * 4 * 2**22))
    dist.destroy_process_group()


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write a measured table. Raises UsageError for a file that exists, MegatfmError if it can't be written."""
    import tomli_w

    from megatfm.files import atomic_write, name_write_errors

    if path.exists():
        raise UsageError(f"--calibrate {path}: the file exists: give another name")
    with name_write_errors(path):
        atomic_write(path, tomli_w.dumps(table))
