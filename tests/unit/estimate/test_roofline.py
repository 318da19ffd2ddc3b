"""Files of users with devices and nodes; times of matmuls by shape, against workers that take tile after tile."""

import heapq
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import load_config
from megatfm.describe.activation_memory import replace_grouped_matmul
from megatfm.errors import UsageError
from megatfm.estimate.devices import Cluster, Device, load_cluster
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
from tests.support.forked_commands import run_command
from tests.support.tensors import OperatorRecorder

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


def describe_grouped_product(operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[tuple[int, ...]]:
    """Groups, m, n and k of torch's grouped product; a reduction over rows has a group's share of them as k."""
    if operator._schema.name != "aten::_grouped_mm":
        return []
    left, right, output = inputs[0].shape, inputs[1].shape, outputs[0].shape
    groups = max(left[:-2] + right[:-2] + output[:-2])
    over_rows = len(left) == len(right) == 2
    m = left[-2] if over_rows else left[-2] // groups
    return [(groups, m, right[-1], left[-1] // groups if over_rows else left[-1])]


def test_grouped_products_are_noted_with_the_shapes_of_executed_ones() -> None:
    groups, rows, outer, inner = 4, 64, 32, 48
    x = torch.zeros(groups * rows, inner, requires_grad=True)
    weight = torch.zeros(groups, outer, inner, requires_grad=True)
    ends = rows * torch.arange(1, groups + 1, dtype=torch.int32)
    with OperatorRecorder(describe_grouped_product) as executed:
        KERNELS["grouped"](x, weight, ends).square().sum().backward()
    noted: list[tuple[int, ...]] = []

    def note(name: str, kind: str, flops: float, inputs: Any, outputs: Any, dims: tuple[int, ...]) -> None:
        noted.append(tuple(rows if size == ROWS else size for size in dims))

    with replace_grouped_matmul(partial(GroupedMatmulStandIn.apply, note)):
        KERNELS["grouped"](x, weight, ends).square().sum().backward()
    assert len(noted) == 3
    assert sorted(noted) == sorted(executed.records)


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


LINK = '{ name = "a", bandwidth = 1e9, efficiency = 1.0, latency = 1e-5 }'


def load(folder: Path, text: str, **options: int) -> Cluster:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster("x", 8, hardware=path, **options)


def test_a_section_has_the_keys_of_those_that_it_extends(tmp_path: Path) -> None:
    text = """
    [device.y]
    extends = "a100"
    memory_gib = 60.0
    [device.x]
    extends = "y"
    name = "X"
    [node.n]
    extends = "dgx-a100"
    gpus = 4
    """
    cluster, plain = load(tmp_path, text), load_cluster("a100", 8)
    assert (cluster.device.key, cluster.device.name, cluster.device.memory_gib) == ("x", "X", 60.0)
    assert cluster.device.flops == plain.device.flops
    assert cluster.node == plain.node
    four = load(tmp_path, text + '[default_node]\nx = "n"\n')
    assert (four.node.gpus, four.node.within) == (4, plain.node.within)
    with_byte_order_mark = load(tmp_path, "\ufeff" + text)
    assert with_byte_order_mark == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[device.x]\nextends = "h100"\nmemmory_gib = 3', r"\[device.x\] memmory_gib: unknown key \(did you mean"),
        ('[device.x]\nname = "X"', r"\[device.x\] lacks memory_gib, flops.*: give them, or extends = \"h100\""),
        ('[device.x]\nextends = "h1000"', r"\[device.x\] extends = 'h1000': unknown \(did you mean 'h100'"),
        ('[device.x]\nextends = "x"', r"'x' extends itself \(x → x\)"),
        ('[device.x]\nextends = "h100"\nmemory_gib = -4', r"\[device.x\] memory_gib = -4: .*greater than 0"),
        ('[device.x]\nextends = "h100"\nmatmul_efficiency = 60', r"matmul_efficiency = 60: .*less than or equal to 1"),
        ('[device.x]\nextends = "h100"\ntile = 128', r"\[device.x\] tile = 128: .*tuple"),
        ('[device.x]\nextends = "h100"\nmemory_gib = inf', r"memory_gib = inf: .*finite"),
        ('[device.x]\nextends = "h100"\nproducts = { fp32 = [] }', r"products.fp32 = \[\]: .*at least 1"),
        ('[device.x]\nextends = "h100"\nproducts = { fp32 = [[8, 8, 1e-6]] }', r"lacks products.fp32.0.3"),
        ('[device.x]\nextends = "h100"\nmoves = [[4096, -1.0]]', r"moves.0.1 = -1.0: .*greater than 0"),
        ('[device.x]\nextends = "h100"\nflops = 3e14', r"\[device.x\] flops = 3.*: .*dictionary"),
        ('[device.x]\nextends = "h100"\nflops = { bfloat16 = 3e14 }', r"flops.*'bfloat16': .*bf16|fp16"),
        ('device = "x"', r"'device' is not a table \[device.NAME\]"),
        ('[device]\nx = "h100"', r"'device' is not a table \[device.NAME\]"),
        ('[gpu.x]\nname = "X"', "no table 'gpu': there are default_node, device, node"),
        ('[device.x]\nextends = "h100"\n[node.n]\ngpus = 8\n[default_node]\nx = "n"', "n\\] lacks within, between"),
        (f'[device.x]\nextends = "h100"\n[node.n]\ngpus = 0\nwithin = {LINK}\nbetween = {LINK}\ndisk_bandwidth = 1e9\n'
         'source = "s"\n[default_node]\nx = "n"', r"\[node.n\] gpus = 0: .*greater than 0"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_key_and_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, text)


def test_a_table_of_an_earlier_calibration_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text('[device.here]\nextends = "cpu"\noperators = { gelu = 1.5 }\n')
    with pytest.raises(UsageError, match=r"operators\.gelu = 1\.5: .*measure the machine anew: --calibrate FILE"):
        load_cluster("here", 1, hardware=path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus 0: choose 1 or more"),
        (["--gpus", str(10**18)], f"--gpus {10**18}: no cluster has more than 16,777,216"),  # ran for hours
        (["--gpus-per-node", "0"], "--gpus-per-node 0: choose 1 or more"),
        (["--gpus-per-node", "-3"], "--gpus-per-node -3: choose 1 or more"),
        (["--gpus", "7"], "is not a multiple of train.micro_batch = 8 × 7 data ranks: the nearest that is one is 504"),
        (["--search", "--write", "old.toml"], "--write old.toml: the file exists: give another name"),
        (["--search", "--write", "new.toml"], "--write new.toml: the file new.sbatch exists: give another name"),
        (["--write", "older.toml"], "--write older.toml: the file older.config.toml exists: give another name"),
        (["--rank", "3"], "--rank 3: an estimate covers all ranks: add --traced, or leave --rank out"),
        (["--traced", "--rank", "-1"], "--rank -1: there are ranks 0 to 7"),
        (["--traced", "--rank", "2", "--gpus", "2"], "--rank 2: there are ranks 0 to 1"),
        (["--html", "no/page.html"], "--html no/page.html: there is no folder no"),
        (["--calibrate", "old.toml"], "--calibrate old.toml: the file exists: give another name, or use it"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_before_it_is_computed(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old.toml", "new.sbatch", "older.config.toml"):
        (tmp_path / name).touch()
    assert run_command("estimate", "gpt2-124m", *words) == 2
    output, errors = capsys.readouterr()
    assert not output
    assert message in errors
