"""Time of operators on a device: a roofline (Williams et al. 2009) of matmuls, attention and memory-bound operators.

The rate of a matmul depends on its shape: partly filled tiles, and a last wave with idle multiprocessors, take as long
as full ones. Matmuls with fewer tiles than multiprocessors split K. Compiled code reads and writes a region of
elementwise operators once.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatfm.estimate.devices import Device
from megatfm.estimate.operators import Operator

SMALLER_TILES = ((1, 1.0), (2, 0.8), (4, 0.55))
"""Divisors of a device's tile, and the share of the peak rate that tiles of this size reach."""
NEIGHBOURS = 12
"""Measured matmuls from which the rate of another shape is interpolated."""
MIN_SLICE = 256
"""Least K of a slice of split-K: shorter ones don't hide a tile's start and end (assumed)."""
PARTIAL_BYTES = 8
"""Bytes by which a slice's float32 result of an element is written and read."""
KERNELS_PER_REGION = 1.5
"""Average number of kernels in a compiled region."""


@dataclass(frozen=True)
class Seconds:
    """Seconds by kind of operator. host: of the host to launch the kernels."""

    matmul: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Time of the pass: the device's or the host's, whichever is longer."""
        return max(self.matmul + self.attention + self.pointwise, self.host)


def estimate_pass_seconds(
    device: Device, operators: Sequence[Operator], *, compiled: bool, fp8: bool = False
) -> Seconds:
    """Estimate the seconds of a pass's kernels, without collectives."""
    matmul = sum(estimate_matmul_seconds(device, op, fp8) for op in operators if op.kind == "matmul")
    attention = sum(estimate_attention_seconds(device, op) for op in operators if op.kind == "attention")
    elementwise = [op for op in operators if op.kind == "pointwise" and (op.is_eager or not compiled)]
    n_kernels: float = len(elementwise)
    pointwise = sum(estimate_elementwise_seconds(device, op) for op in elementwise)
    if compiled:
        rate = device.memory_bandwidth * device.memory_efficiency
        regions = list(iter_fused_regions(operators))
        n_kernels += KERNELS_PER_REGION * len(regions)
        pointwise += sum(max(n_bytes / rate, device.launch_seconds) for n_bytes in regions)
    host = device.host_seconds * (n_kernels + sum(op.kind != "pointwise" for op in operators))
    if device.kind == "cpu":  # the host computes, too: nothing overlaps
        return Seconds(matmul, attention, pointwise + host)
    return Seconds(matmul, attention, pointwise, host)


def estimate_elementwise_seconds(device: Device, operator: Operator) -> float:
    """Estimate the seconds of a memory-bound operator: by the device's bandwidth, or by its measurements."""
    rate = device.memory_bandwidth * device.memory_efficiency
    rows = device.operators.get(operator.variant) or device.operators.get(operator.name) or device.moves
    if not rows:
        return max(operator.moved_bytes / rate, device.launch_seconds)
    return _interpolate_seconds(rows, operator.moved_bytes, device.launch_seconds, 1 / rate)


def _interpolate_seconds(rows: Sequence[Sequence[float]], size: float, least: float, unit_seconds: float) -> float:
    """Interpolate measured (size, seconds), in logarithms. Rows of one size count by their mean.

    least: seconds of an empty operator, to which a line leads from the smallest size. Above the largest size, a unit
    takes `unit_seconds`, or as long as the units between half of that size and all of it, if that is longer.
    """
    by_size: dict[float, list[float]] = {}
    for measured_size, seconds in rows:
        by_size.setdefault(measured_size, []).append(seconds)
    sizes = sorted(by_size)
    means = [np.log(np.mean(by_size[measured_size])) for measured_size in sizes]
    if size < sizes[0]:
        smallest = math.exp(means[0])
        return float(smallest - max(0.0, smallest - least) * (1 - size / sizes[0]))
    if size > sizes[-1]:
        n_smaller = bisect_right(sizes, sizes[-1] / 2)
        if n_smaller:
            difference = math.exp(means[-1]) - math.exp(means[n_smaller - 1])
            unit_seconds = max(unit_seconds, difference / (sizes[-1] - sizes[n_smaller - 1]))
        return float(math.exp(means[-1]) + (size - sizes[-1]) * unit_seconds)
    return float(math.exp(np.interp(math.log(size), np.log(sizes), means)))


def name_matmuls(operator: Operator, fp8: bool = False) -> str:
    """Return the name of a matmul's measured table: precision, and the operands' layout if not that of `x @ W.T`."""
    words = [_get_precision(operator.itemsize, fp8)]
    if operator.dims is not None and operator.dims[0] > 1:
        words.append("batched")
    if operator.variant and (operator.variant != "nt" or len(words) > 1):
        words.append(operator.variant)
    return " ".join(words)


def interpolate_rate(rows: Sequence[Sequence[float]], m: int, n: int, k: int) -> float:
    """Interpolate the FLOP/s of a matmul: a plane in logarithms, fitted to the nearest measured ones by their distance.

    rows: (m, n, k, seconds).
    """
    table = np.asarray(rows, dtype=float)
    sizes, point = np.log2(table[:, :3]), np.log2([m, n, k])
    distance = np.linalg.norm(sizes - point, axis=1)
    nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
    rates = np.log(2 * table[nearest, :3].prod(1) / table[nearest, 3])
    if distance[nearest[0]] < 1e-9:
        return float(np.exp(rates[0]))
    weights = 1 / distance[nearest] ** 2
    columns = np.hstack([np.ones((len(nearest), 1)), sizes[nearest] - point])
    plane, *_ = np.linalg.lstsq(columns * weights[:, None], rates * weights, rcond=None)
    return float(np.exp(np.clip(plane[0], rates.min(), rates.max())))


def estimate_matmul_seconds(device: Device, operator: Operator, fp8: bool = False) -> float:
    """Estimate the seconds of a matmul, or of a batch of equal ones."""
    assert operator.dims is not None
    batch, m, n, k = operator.dims
    precision = _get_precision(operator.itemsize, fp8)
    table_name = name_matmuls(operator, fp8)
    names = (table_name, table_name.removesuffix(" strided"), precision)
    if measured := next((device.products[name] for name in names if device.products.get(name)), None):
        return batch * 2 * m * n * k / interpolate_rate(measured, m, n, k)
    peak = device.peak(precision) * device.matmul_efficiency
    computed = math.inf
    for divisor, share in SMALLER_TILES:
        rows, columns = (size // divisor for size in device.tile)
        if not rows or not columns:
            break
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        at_once = device.multiprocessors * divisor**2
        wave = at_once * rows * columns * 2 * k / (peak * share)
        slices = min(at_once // tiles, k // MIN_SLICE)
        split_k = _estimate_split_k_seconds(device, wave, batch * m * n, slices)
        computed = min(computed, math.ceil(tiles / at_once) * wave, split_k)
    memory_bound = operator.moved_bytes / (device.memory_bandwidth * device.memory_efficiency)
    return max(computed, memory_bound, device.launch_seconds)


def _estimate_split_k_seconds(device: Device, wave: float, numel: int, max_slices: int) -> float:
    """Estimate the seconds of a matmul whose K is cut into slices that run at once and are summed by a second kernel.

    wave: seconds without slices; numel: of the result. It takes the best number of slices.
    """
    if max_slices < 2:
        return math.inf
    partial = numel * PARTIAL_BYTES / (device.memory_bandwidth * device.memory_efficiency)
    optimum = math.sqrt(wave / partial)
    candidates = (min(max_slices, max(2, slices)) for slices in (math.floor(optimum), math.ceil(optimum)))
    return min(wave / slices + slices * partial for slices in candidates) + device.launch_seconds


def estimate_attention_seconds(device: Device, operator: Operator) -> float:
    """Estimate the seconds of a fused attention kernel."""
    if rows := device.attention.get("backward" if operator.is_backward else "forward"):
        return _interpolate_seconds(rows, operator.flops, device.launch_seconds, max(t / flops for flops, t in rows))
    share = device.attention_backward if operator.is_backward else 1.0
    peak = device.peak(_get_precision(operator.itemsize, False)) * device.attention_efficiency * share
    memory_bound = operator.moved_bytes / (device.memory_bandwidth * device.memory_efficiency)
    return max(operator.flops / peak, memory_bound, device.launch_seconds)


def iter_fused_regions(operators: Iterable[Operator]) -> Iterable[int]:
    """Yield the bytes that each compiled region of elementwise operators reads and writes; results within it cost
    nothing."""
    ops = list(operators)
    last_read = {number: i for i, op in enumerate(ops) for number in op.reads}
    start = 0
    for end in range(len(ops) + 1):
        if end < len(ops) and ops[end].kind == "pointwise" and not ops[end].is_eager:
            continue
        if region := ops[start:end]:
            writes = {number: n_bytes for op in region for number, n_bytes in op.writes.items()}
            inputs = {n: b for op in region for n, b in op.reads.items() if n not in writes}
            outputs = sum(b for n, b in writes.items() if last_read.get(n, end) >= end)
            yield sum(inputs.values()) + outputs
        start = end + 1


def _get_precision(itemsize: int, fp8: bool) -> str:
    if fp8 and itemsize <= 2:
        return "fp8"
    return {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"}[itemsize]
