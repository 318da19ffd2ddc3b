"""Times of matmuls by shape, against workers that take tiles one after the other."""

import heapq
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.config import load_config
from megatfm.describe.activation_memory import replace_grouped_matmul
from megatfm.estimate.devices import Device, load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.operators import Operator
from megatfm.estimate.quick import scale_profile
from megatfm.estimate.roofline import (
    estimate_attention_seconds,
    estimate_elementwise_seconds,
    estimate_matmul_seconds,
    estimate_pass_seconds,
)
from megatfm.estimate.stand_ins import ROWS, GroupedMatmulStandIn
from megatfm.ops.moe import KERNELS

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
    """Return when the last of equal jobs ends."""
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
    assert estimate_matmul_seconds(device, product) == pytest.approx(fastest(*shape), rel=1e-9)


def test_a_device_without_tiles_computes_at_its_peak(device: Device) -> None:
    """A table by hand, or one of a machine whose matmuls were not measured in this precision."""
    untiled = replace(device, tile=(1, 1), multiprocessors=1, flops={"bf16": 1e12})
    seconds = estimate_matmul_seconds(untiled, Operator("mm", "matmul", 0.0, {}, {}, (1, 100, 200, 300)))
    assert seconds == pytest.approx(max(2 * 100 * 200 * 300 / 1e12, LAUNCH), rel=1e-9)


def test_measured_additions_are_sorted_by_their_bytes(device: Device) -> None:
    operator = Operator("mul", "pointwise", 0.0, {1: 1 << 20}, {})
    measured = replace(device, moves=[(1 << 10, 1e-6), (1 << 20, 1e-3), (1 << 30, 1.0)])
    assert estimate_elementwise_seconds(measured, operator) == pytest.approx(1e-3)
    assert estimate_elementwise_seconds(replace(measured, moves=measured.moves[::-1]), operator) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("name", "shape", "layout", "seconds"),
    [
        ("mm", (1, 8, 8, 8), "nt", 1.0),
        ("mm", (1, 8, 8, 8), "nn", 2.0),
        ("bmm", (5, 8, 8, 8), "nn", 5 * 3.0),
        ("mm", (1, 8, 8, 8), "tn", 1.0),
        ("bmm", (5, 8, 8, 8), "nt", 5 * 1.0),
    ],
)
def test_matmuls_are_measured_by_layout(
    device: Device, name: str, shape: tuple[int, int, int, int], layout: str, seconds: float
) -> None:
    """Layouts without a table of their own take the one of `x @ W.T`."""
    tables = {"bf16": [(8, 8, 8, 1.0)], "bf16 nn": [(8, 8, 8, 2.0)], "bf16 batched nn": [(8, 8, 8, 3.0)]}
    product = Operator(name, "matmul", 0.0, {}, {}, shape, variant=layout)
    assert estimate_matmul_seconds(replace(device, products=tables), product) == pytest.approx(seconds)


def test_the_host_of_a_cpu_adds_its_time_and_that_of_a_gpu_does_not(device: Device) -> None:
    operators = [Operator("mul", "pointwise", 0.0, {1: 1 << 20}, {}, variant="mul")] * 3
    measured = replace(device, operators={"mul": [(1 << 20, 1e-3)]}, host_seconds=1e-4)
    gpu, cpu = (
        estimate_pass_seconds(replace(measured, kind=kind), operators, compiled=False).total for kind in ("cuda", "cpu")
    )
    assert gpu == pytest.approx(3e-3)
    assert cpu == pytest.approx(3e-3 + 3e-4)


def test_measured_attention_comes_before_a_rate(device: Device) -> None:
    tables: Any = {"forward": [(1e9, 1e-3), (4e9, 4e-3)], "backward": [(1e9, 3e-3)]}
    measured = replace(device, attention=tables)
    forward = Operator("attention", "attention", 2e9, {}, {})
    assert estimate_attention_seconds(measured, forward) == pytest.approx(2e-3)
    assert estimate_attention_seconds(measured, replace(forward, flops=8e9)) == pytest.approx(4e-3 + 4e-3)
    assert estimate_attention_seconds(measured, replace(forward, is_backward=True)) == pytest.approx(6e-3)


def test_a_gradient_of_a_small_weight_uses_all_multiprocessors(device: Device) -> None:
    m, n, k = 128, 256, 1 << 20
    whole_rate = 2 * m * n * k / (PROCESSORS * 1e12)
    assert estimate_matmul_seconds(device, Operator("mm", "matmul", 0.0, {}, {}, (1, m, n, k))) < 1.01 * whole_rate


@pytest.mark.parametrize("tp", [1, 2])
def test_the_loss_reads_its_logits_twice_and_writes_them_once(tp: int) -> None:
    """The kernels of `ops.cross_entropy_triton`, between which shards exchange three float32 of each token."""
    overrides = ["train.precision=bf16", "data.sequence_length=64", "train.micro_batch=2", "model.n_layers=1"]
    config = load_config("gpt2-124m", [*overrides, "model.vocab_size=1024", f"parallel.tp={tp}"])
    with open_estimator(config, load_cluster("h100", 2)) as opened:
        head = opened.profile(config).parts[-1]
    moved = sum(op.moved_bytes for op in head.forward if op.name == "cross_entropy")
    assert moved == 2 * 64 * (3 * 1024 // tp * 2 + (tp > 1) * 2 * 3 * 4)


class GroupedShapes(TorchDispatchMode):
    """Notes groups, m, n and k of torch's grouped products; a reduction over rows has a group's share of them as k."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_grouped_mm":
            left, right = args[0].shape, args[1].shape
            groups = max(left[:-2] + right[:-2] + out.shape[:-2])
            over_rows = len(left) == len(right) == 2
            m = left[-2] if over_rows else left[-2] // groups
            self.dims.append((groups, m, right[-1], left[-1] // groups if over_rows else left[-1]))
        return out


def test_grouped_products_are_noted_with_the_shapes_of_executed_ones() -> None:
    groups, rows, outer, inner = 4, 64, 32, 48
    x = torch.zeros(groups * rows, inner, requires_grad=True)
    weight = torch.zeros(groups, outer, inner, requires_grad=True)
    ends = rows * torch.arange(1, groups + 1, dtype=torch.int32)
    with GroupedShapes() as executed:
        KERNELS["grouped"](x, weight, ends).square().sum().backward()
    noted: list[tuple[int, ...]] = []

    def note(name: str, kind: str, flops: float, inputs: Any, outputs: Any, dims: tuple[int, ...]) -> None:
        noted.append(tuple(rows if size == ROWS else size for size in dims))

    with replace_grouped_matmul(partial(GroupedMatmulStandIn.apply, note)):
        KERNELS["grouped"](x, weight, ends).square().sum().backward()
    assert len(noted) == 3
    assert sorted(noted) == sorted(executed.dims)


@pytest.mark.parametrize("factor", [2, 4])
def test_experts_of_a_larger_micro_batch_are_those_of_its_profile(factor: int) -> None:
    """Scaled from one row, or profiled: the same products, so the same seconds."""
    config = load_config("olmoe-1b-7b", [])
    with open_estimator(config, load_cluster("h100", 8)) as opened:
        sizes = {}
        for rows in (1, factor):
            changed = config.with_changes({"train.micro_batch": rows, "train.precision": "bf16"})
            (part,) = {id(part): part for part in opened.profile(changed).parts if part.is_block}.values()
            sizes[rows] = scale_profile(part, factor // rows, config.data.sequence_length)
    dims = [
        sorted(op.dims for op in (*part.forward, *part.backward) if op.name == "_grouped_mm" and op.dims)
        for part in sizes.values()
    ]
    assert dims[0] == dims[1]
    assert len(dims[0]) >= 6
