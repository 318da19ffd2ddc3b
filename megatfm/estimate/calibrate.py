"""Measures the machine at hand: matmuls by shape, memory by bytes, elementwise operators, attention, and the link.

Measurements take turns over several rounds, and the fastest of each counts, so that other load on the machine disturbs
all alike. On a CPU, time is that of this process's threads.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

from megatfm.errors import UsageError
from megatfm.estimate.devices import CALIBRATED_PRECISIONS, GIB, NODE, Device
from megatfm.estimate.trials import TrialTimes, fit_overheads, tabulate_attention, tabulate_matmuls, tabulate_operators
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
ROUNDS, MAX_ROUNDS, AGREEMENT = 5, 25, 0.02
MIN_SECONDS = 2e-3
"""Shortest measurement; short operators are repeated in it."""


def measure_device(device: torch.device, precision: str, times: TrialTimes) -> dict[str, Any]:
    """Measure this machine and return tables as in `devices.toml`: a device and a node, both called "here".

    times: of small steps and their operators (`measure_trials`).
    """
    clock = Clock(device)
    kind, dtype = device.type, DTYPES[precision]
    products = tabulate_matmuls(times)
    for table_name, rows in _measure_matmuls(clock, precision, device).items():
        products.setdefault(table_name, []).extend(rows)
    sizes = MOVED_BYTES[kind]
    moves = clock.measure_fastest([_make_in_place_addition(n_bytes, dtype, device) for n_bytes in sizes])
    rate = max(n_bytes / seconds for n_bytes, seconds in zip(sizes, moves, strict=True) if n_bytes > 2**20)
    forward, backward = _measure_attention_rates(clock, dtype, device)
    peak = max(forward, *(2 * m * n * k / seconds for m, n, k, seconds in products[precision]))
    name = (
        torch.cuda.get_device_name(device)
        if kind == "cuda"
        else f"{describe_processor()['cpu']}, {torch.get_num_threads()} threads"
    )
    memory = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else psutil.virtual_memory().total
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
        "launch_seconds": min(moves),
        "host_seconds": 8e-6 if kind == "cuda" else 0.0,
        "reserved_gib": 2.5 if kind == "cuda" else 0.5,
        "compiles": kind == "cuda",
        "products": products,
        "moves": [list(pair) for pair in zip(sizes, moves, strict=True)],
        "operators": tabulate_operators(times),
        "attention": tabulate_attention(times),
        "source": f"measured by megatfm estimate --calibrate, torch {torch.__version__}",
    }
    if times.trials:
        overheads = fit_overheads(times, Device(key=NODE, **table))
        table |= vars(overheads)
    link = measure_link(kind)
    node = {
        "gpus": max(1, torch.cuda.device_count()) if kind == "cuda" else psutil.cpu_count() or 1,
        "within": link,
        "between": link,
        "disk_bandwidth": 1e9,
        "source": "link measured between processes of this machine; disk assumed",
    }
    return {"device": {NODE: table}, "node": {NODE: node}, "default_node": {NODE: NODE}}


def _measure_matmuls(clock: "Clock", precision: str, device: torch.device) -> dict[str, list[list[float]]]:
    """Return rows m, n, k, seconds by table: that of the precision, and one for each further layout."""
    shapes = list_matmul_shapes(device.type)
    pairs = [(layout, shape) for layout in LAYOUTS for shape in shapes]
    seconds = clock.measure_fastest([make_matmul(shape, DTYPES[precision], device, layout) for layout, shape in pairs])
    rows_by_table: dict[str, list[list[float]]] = {}
    for (layout, shape), t in zip(pairs, seconds, strict=True):
        rows_by_table.setdefault(precision if layout == "nt" else f"{precision} {layout}", []).append([*shape, t])
    return rows_by_table


def list_matmul_shapes(kind: str) -> list[tuple[int, int, int]]:
    """Return the shapes (m, n, k) of the matmuls that are measured."""
    triples = itertools.product(MATMUL_SIZES[kind], repeat=3)
    return [(m, n, k) for m, n, k in triples if 2 * m * n * k < MAX_SECONDS[kind] * EXPECTED_FLOPS[kind]]


class Clock:
    """Stopwatch of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read_seconds(self) -> float:
        """Return the device's time in seconds: on a CPU that of this process's threads."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter()
        return time.process_time() / torch.get_num_threads()

    def measure_fastest(self, functions: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
        """Return the seconds of one call of each function, the least of several rounds in which they take turns.

        After `rounds` rounds those go on whose three least times differ by more than `AGREEMENT`: on a machine with
        neighbours, a single one may have been measured beside them.
        """
        n_repeats = []
        for function in functions:
            function()
            start = self.read_seconds()
            function()
            n_repeats.append(max(1, round(MIN_SECONDS / max(self.read_seconds() - start, 1e-7))))
        times: list[list[float]] = [[] for _ in functions]
        for round_number in range(MAX_ROUNDS):
            for function, repeats, measured in zip(functions, n_repeats, times, strict=True):
                if round_number >= rounds and sorted(measured)[2] <= (1 + AGREEMENT) * min(measured):
                    continue
                start = self.read_seconds()
                for _ in range(repeats):
                    function()
                measured.append((self.read_seconds() - start) / repeats)
        return [min(measured) for measured in times]


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


def _measure_attention_rates(clock: Clock, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return the FLOP/s of causal attention's two passes; masked pairs do not count."""
    length, heads, width = (512, 4, 64) if device.type == "cpu" else (4096, 16, 128)
    size = (1, heads, length, width)
    q, k, v = (torch.randn(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    flops = 2 * 2 * heads * width * length * (length + 1) / 2

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_backward() -> None:
        forward().sum().backward()

    forward_seconds, seconds = clock.measure_fastest([forward, forward_backward])
    return flops / forward_seconds, 2.5 * flops / max(seconds - forward_seconds, 1e-9)


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
    return {
        "name": name,
        "bandwidth": n_bytes / max(seconds - latency, 1e-9),
        "efficiency": 1.0,
        "latency": latency,
    }


def _exchange(rank: int, ranks: int, backend: str, port: int, queue: Any) -> None:
    """Measure all-gathers of few and of many bytes, in which each rank sends (ranks − 1) shards."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    seconds = []
    for numel in (16, 2**22):
        shard = torch.ones(numel, device=device)
        gathered = [torch.empty_like(shard) for _ in range(ranks)]
        least = float("inf")
        for _ in range(ROUNDS + 1):
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
