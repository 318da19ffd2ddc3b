"""Times of matmuls by shape, against workers that take tiles one after the other."""

import heapq
import math
from dataclasses import replace

import pytest

from megatfm.estimate.devices import Device, load_cluster
from megatfm.estimate.operators import Operator
from megatfm.estimate.roofline import matmul_seconds

PROCESSORS = 6
LAUNCH = 1e-6


@pytest.fixture(scope="module")
def device() -> Device:
    """Six multiprocessors of 1 TFLOP/s, and a memory of 1 TB/s."""
    return replace(
        load_cluster("h100", 1).device,
        flops={"bf16": PROCESSORS * 1e12}, memory_bandwidth=1e12, multiprocessors=PROCESSORS, tile=(128, 256),
        matmul_efficiency=1.0, memory_efficiency=1.0, launch_seconds=LAUNCH,
    )  # fmt: skip


def last_end(jobs: int, workers: int, seconds: float) -> float:
    """When the last of equal jobs ends."""
    ends = [0.0] * workers
    for _ in range(jobs):
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def fastest(batch: int, m: int, n: int, k: int) -> float:
    """The least of all tile sizes and all numbers of slices of K."""
    seconds = []
    for rows, columns, share in ((128, 256, 1.0), (64, 128, 0.8), (32, 64, 0.55)):
        workers = PROCESSORS * 128 * 256 // (rows * columns)
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        tile_seconds = 2 * rows * columns * k / (share * 1e12 * PROCESSORS / workers)
        seconds.append(last_end(tiles, workers, tile_seconds))
        for slices in range(2, workers + 1):
            if slices * tiles <= workers and k // slices >= 256:
                summed = slices * batch * m * n * (4 + 4) / 1e12 + LAUNCH
                seconds.append(last_end(slices * tiles, workers, tile_seconds / slices) + summed)
    return max(min(seconds), LAUNCH)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 64, 1 << 18), (1, 128, 256, 1 << 16), (1, 200, 300, 40_000), (4, 30, 60, 9_000), (1, 96, 4096, 2048),
        (2, 500, 500, 600), (1, 512, 1024, 100_000), (1, 2048, 2048, 2048), (1, 16, 16, 300),
    ],
)  # fmt: skip
def test_a_matmul_takes_as_long_as_its_tiles_and_slices(device: Device, shape: tuple[int, int, int, int]) -> None:
    product = Operator("mm", "matmul", 0.0, {}, {}, shape)
    assert matmul_seconds(device, product) == pytest.approx(fastest(*shape), rel=1e-9)


def test_a_gradient_of_a_small_weight_uses_all_multiprocessors(device: Device) -> None:
    m, n, k = 128, 256, 1 << 20
    whole_rate = 2 * m * n * k / (PROCESSORS * 1e12)
    assert matmul_seconds(device, Operator("mm", "matmul", 0.0, {}, {}, (1, m, n, k))) < 1.01 * whole_rate
