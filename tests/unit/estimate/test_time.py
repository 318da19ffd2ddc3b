"""Time of a step: the simulated pipeline, stalls, failures with their checkpoints, and a run's record beside it."""

import json
import os
import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatfm.config import Config, ParallelConfig, load_config, to_toml
from megatfm.errors import UsageError
from megatfm.estimate.devices import Link, Node, load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.part_time import PartTime, with_local_experts
from megatfm.estimate.recorded import find_device, read_recorded, read_snapshot_owners
from megatfm.estimate.roofline import Seconds
from megatfm.estimate.schedule import list_running_passes, simulate
from megatfm.estimate.stalls import (
    AUX_LOSS_MAX_VIOLATION,
    estimate_data_stall,
    estimate_effective_share,
    estimate_fullest_share,
)
from megatfm.estimate.traffic import (
    Axis,
    Flows,
    estimate_axis_seconds,
    estimate_collective_seconds,
    leaves_node,
    make_axes,
)
from megatfm.parallel.pipeline_schedule import build_schedule, stage_to_rank
from tests.support.launch_jobs import run_megatfm
from tests.support.layouts import bubble_fraction
from tests.support.layouts import simulate_schedule as simulate_plain

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.2, "W": 0.8}


def costs(stages: int) -> dict[str, list[float]]:
    return {kind: [seconds] * stages for kind, seconds in SECONDS.items()}


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 7), (5, 5), (4, 1)])
def test_the_bubble_of_1f1b(ranks: int, microbatches: int) -> None:
    actual = simulate("1f1b", ranks, 1, microbatches, range(ranks), costs(ranks), 0.0)
    assert actual.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=1e-12)
    for rank, passes in enumerate(list_running_passes("1f1b", ranks, 1, microbatches)):
        assert max(sum(running.waiting) for running in passes) == min(ranks - rank, microbatches) - 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"])
def test_the_fullest_passes_of_a_schedule(schedule: str) -> None:
    """Each pass is one of those listed, or has no more micro-batches waiting; each of those listed is run."""
    ranks, per_rank = 3, 1 if schedule in ("gpipe", "1f1b") else 2
    queues = build_schedule(schedule, ranks, per_rank, 7)
    for queue, listed in zip(queues, list_running_passes(schedule, ranks, per_rank, 7), strict=True):
        waiting = {(running.stage, running.is_forward): set[tuple[int, ...]]() for running in listed}
        for place, (stage, kind, microbatch) in enumerate(queue):
            before = [(s, k, i) for s, k, i in queue[:place] if (s, i) != (stage, microbatch)]
            counts = [0] * 2 * ranks * per_rank
            for s, k, _ in before:
                counts[s] += {"F": 1, "B": -1, "I": -1, "W": 0}[k]
                counts[s + ranks * per_rank] += {"F": 0, "B": 0, "I": 1, "W": -1}[k]
            if kind != "W":
                waiting[stage, kind == "F"].add(tuple(counts))
        for running in listed:
            key = running.stage, running.is_forward
            assert (*running.waiting, *running.half_done) in waiting[key]
        for (stage, is_forward), vectors in waiting.items():
            same = [r for r in listed if (r.stage, r.is_forward) == (stage, is_forward)]
            for counts in vectors:
                pairs = [list(zip(counts, (*r.waiting, *r.half_done), strict=True)) for r in same]
                assert any(all(n <= m for n, m in pair) for pair in pairs)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"])
def test_schedules_take_as_long_as_in_their_own_simulator(schedule: str) -> None:
    virtual = 1 if schedule == "gpipe" else 2
    rank_of = stage_to_rank(schedule, 3, virtual)
    actual = simulate(schedule, 3, virtual, 7, rank_of, costs(len(rank_of)), 0.0)
    plain = simulate_plain(build_schedule(schedule, 3, virtual, 7), rank_of, SECONDS)
    assert actual.seconds == pytest.approx(max(rank.last for rank in plain), rel=1e-12)
    assert actual.bubble == pytest.approx(bubble_fraction(plain), rel=1e-9)


def test_a_transfer_is_waited_for_between_ranks_alone() -> None:
    actual = simulate("1f1b", 2, 1, 1, [0, 1], costs(2), 0.5)
    assert actual.seconds == pytest.approx(2 * (1.0 + 2.0) + 2 * 0.5)
    slow = {kind: [seconds, 3 * seconds] for kind, seconds in SECONDS.items()}
    assert simulate("1f1b", 2, 1, 1, [0, 1], slow, 0.0).seconds == pytest.approx(1 + 3 + 6 + 2)


NETWORK = Link("network", 10.0, 1.0, 0.0)
NODE_OF_TWO = Node("two", 2, Link("NVLink", 100.0, 1.0, 0.0), NETWORK, 1.0, "test")


def test_axes_that_leave_the_node_take_turns_on_its_network() -> None:
    """cp sends 30 bytes and dp_shard 20 at 10 bytes a second; a ring of neighbours shares two cards for its 60."""
    axes = [Axis("tp", 2, 1, 8), Axis("cp", 2, 2, 8), Axis("dp_shard", 2, 4, 8), Axis("dp_replicate", 4, 1, 8)]
    flows, by_name = Flows(), {axis.name: axis for axis in axes}
    for axis, n_bytes in zip(axes, (500, 30, 20, 60), strict=True):
        flows.add(axis, "all_gather", n_bytes)
    for names, seconds in ((["tp"], 5.0), (["cp", "dp_shard"], 3.0 + 2.0), (["dp_replicate"], 60 / (2 * 10.0))):
        assert estimate_axis_seconds(flows, by_name, NODE_OF_TWO, names) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("gpus", [3, 4, 6, 8, 24])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 3, 4), (1, 1, 1, 1, 24), (2, 1, 3, 2, 2), (1, 2, 2, 3, 2)])
def test_the_group_that_straddles_nodes_worst_decides(sizes: tuple[int, ...], gpus: int) -> None:
    """A ring over nodes has as many network cards of a node as it has ranks there."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    axes = make_axes(ParallelConfig.model_validate(dict(zip(names, sizes, strict=True))))
    node, ranks = replace(NODE_OF_TWO, gpus=gpus), np.arange(24).reshape(sizes)
    for dim, (name, size) in enumerate(zip(names, sizes, strict=True)):
        groups = np.moveaxis(ranks, dim, -1).reshape(-1, size)
        cards = [min(Counter(group // gpus).values()) for group in groups if len({*(group // gpus)}) > 1]
        expected = 600 / min([100, *(10 * count for count in cards)]) if size > 1 else 0.0
        assert estimate_collective_seconds(axes[name], node, "all_gather", 600) == pytest.approx(expected), name
        assert leaves_node(axes[name], node) == bool(cards), name


@pytest.mark.parametrize(("shared", "forward", "backward"), [
    ((0.0, 0.0), 4 + 3, 6 + 8), ((3.0, 6.0), 6 + 3, 6 + 8 + 6),
], ids=["two links", "one link"])  # fmt: skip
def test_gathers_hide_behind_computing_and_not_behind_traffic_on_their_link(
    shared: tuple[float, float], forward: float, backward: float
) -> None:
    """Computing takes 4 s and 5 s, context traffic 9 s (a third of it forward), a gather 6 s, a reduction 8 s."""
    computing = Seconds(matmul=4.0), Seconds(matmul=5.0)
    time = PartTime(*computing, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 6.0, 8.0, 0.5, *shared)
    assert time.total(reduces=True) == pytest.approx((forward, backward))
    once = PartTime(*computing, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 6.0, 8.0, 0.5, *shared, gathers_once=True)
    assert sum(once.total(reduces=False)) == pytest.approx(4 + 5 + 9)
    assert once.exposed_first_gather == pytest.approx(max(0.0, 6 + shared[0] - (4 + 3)))


INSTANT = """
default_node.instant = "slow"
[device.instant]
extends = "h100"
flops = { bf16 = 1e30 }
memory_bandwidth = 1e30
launch_seconds = 1e-30
host_seconds = 0
[node.slow]
gpus = 1
within = { name = "none", bandwidth = 1e30, efficiency = 1, latency = 0 }
between = { name = "network", bandwidth = 50e9, efficiency = 1, latency = 0 }
disk_bandwidth = 1e30
source = "test"
"""


@pytest.mark.parametrize("layout", [
    "parallel.tp=2 parallel.cp=2", "parallel.tp=2 parallel.cp=2 parallel.zero=2",
    "parallel.cp=2 parallel.zero=1", "parallel.cp=2 parallel.zero=0",
    "parallel.cp=2 parallel.dp_replicate=2", "parallel.cp=2 parallel.grad_accumulation=sharded",
])  # fmt: skip
def test_devices_that_compute_at_once_wait_for_every_byte(tmp_path: Path, layout: str) -> None:
    """A step with all axes on one link takes as long as the link carries what a rank sends."""
    (tmp_path / "instant.toml").write_text(INSTANT, encoding="utf-8")
    words = ["model.n_layers=2", "model.vocab_size=1000", "data.sequence_length=2048", "train.micro_batch=1"]
    words += ["train.global_batch=8", "train.precision=bf16", "checkpoint.every=100000000", "parallel.dp_shard=-1"]
    cluster = load_cluster("instant", 8, hardware=tmp_path / "instant.toml")
    with open_estimator(load_config("llama3-8b", [*words, *layout.split()]), cluster) as opened:
        estimate = opened.estimate(opened.base)
    assert estimate.time.step == pytest.approx(sum(estimate.flows.sent.values()) / 50e9, rel=0.01)


def draw_share(experts: int, ranks: int, tokens: int, top_k: int, spread: float) -> float:
    """Ninth decile of the fullest rank's load over the mean, of drawn preferences and drawn choices."""
    draw, shares = np.random.default_rng(5), []
    for _ in range(3000):
        load = np.clip(1 + spread * draw.standard_normal(experts), 0, None)
        loads = draw.multinomial(tokens * top_k, load / load.sum()).reshape(ranks, -1).sum(1)
        shares.append(loads.max() / loads.mean())
    return float(np.quantile(shares, 0.9))


@pytest.mark.parametrize(("preset", "ep"), [("mixtral-8x7b", 8), ("olmoe-1b-7b", 16)])
def test_the_fullest_rank_is_that_of_drawn_loads(preset: str, ep: int) -> None:
    config = load_config(preset, [f"parallel.ep={ep}"])
    ffn, tokens = config.model.ffn, 4096 * ep
    experts, top_k = ffn.tp_dims["n_experts"], int(getattr(ffn, "top_k", 0))
    # A spread by which the fullest of 64 experts has 1 + MaxVio times the mean in half of the draws.
    draw = np.random.default_rng(2)
    largest = np.median(draw.standard_normal((20000, 64)).max(1))
    expected = draw_share(experts, ep, tokens, top_k, AUX_LOSS_MAX_VIOLATION / float(largest))
    assert estimate_fullest_share(config, tokens) == pytest.approx(expected, rel=0.03)
    assert estimate_fullest_share(config, tokens, quantile=0.5) < estimate_fullest_share(config, tokens)


def test_experts_with_a_capacity_get_no_more() -> None:
    config = load_config("switch-base-8", ["parallel.ep=8", "model.layer_type.sparse.ffn.capacity_factor=1.25"])
    assert estimate_fullest_share(config, 64) == 1.25


def step_of(*overrides: str) -> tuple[Config, dict[str, float]]:
    with open_estimator(load_config("gpt2-124m", list(overrides)), load_cluster("h100", 8)) as opened:
        estimate = opened.estimate(opened.base)
    state = max(rank.weights + rank.optimizer for rank in estimate.memory)
    return estimate.config, vars(estimate.time) | {"step": estimate.time.step, "state": state}


def test_a_step_has_its_share_of_checkpoints() -> None:
    """All state of eight ranks at 5 GB/s each 20 steps; in the background, a copy of each rank's at 20 GB/s."""
    _, waiting = step_of("checkpoint.every=20", "checkpoint.mode=sync")
    assert waiting["checkpoint"] == pytest.approx(8 * waiting["state"] / 5e9 / 20)
    _, behind = step_of("checkpoint.every=1000")
    assert behind["checkpoint"] == pytest.approx(behind["state"] / 20e9 / 1000)
    _, rushed = step_of("checkpoint.every=1")
    without = rushed["step"] - rushed["checkpoint"]
    assert rushed["checkpoint"] == pytest.approx(rushed["state"] / 20e9 + 8 * rushed["state"] / 5e9 - without)


def test_rows_are_waited_for_where_they_come_late() -> None:
    config, step = step_of()
    assert step["data"] == 0
    rows = config.train.global_batch / 8
    assert estimate_data_stall(config, 1e-9) == pytest.approx(rows * 1024 / 36.7e6, rel=1e-3)
    more = config.model_copy(update={"data": config.data.model_copy(update={"workers": 4})})
    assert estimate_data_stall(more, 1e-9) == pytest.approx(rows * 1024 / 36.7e6 / 4, rel=1e-3)


def simulate_share(interval: float, stall: float, between: float, restart: float, seed: int) -> float:
    """Share of the time that makes progress in a run whose failures come at random."""
    draw, clock, done = random.Random(seed), 0.0, 0.0
    next_failure = draw.expovariate(1 / between)
    while clock < 4000 * between / 10:
        if clock + interval + stall <= next_failure:
            clock, done = clock + interval + stall, done + interval
        else:
            clock = next_failure + restart
            next_failure = clock + draw.expovariate(1 / between)
    return done / clock


@pytest.mark.parametrize(("interval", "stall", "between", "restart"), [(600, 30, 20000, 300), (2000, 5, 30000, 900)])
def test_the_share_is_that_of_a_simulated_run(interval: float, stall: float, between: float, restart: float) -> None:
    shares = [simulate_share(interval, stall, between, restart, seed) for seed in range(8)]
    assert estimate_effective_share(interval, stall, between, restart) == pytest.approx(sum(shares) / 8, rel=0.01)


def test_youngs_interval_is_nearly_the_best() -> None:
    stall, between = 12.0, 40000.0
    best = max(estimate_effective_share(interval, stall, between, 300) for interval in range(60, 8000, 20))
    young = (2 * stall * between) ** 0.5
    assert estimate_effective_share(young, stall, between, 300) > best - 2e-4
    assert estimate_effective_share(young / 4, stall, between, 300) < best - 5e-3


# --------------------------------------------------------------------------------------------- a run's record


H100 = "NVIDIA H100 80GB HBM3"
FRAMES = [
    {"filename": "/usr/lib/torch/nn/functional.py", "line": 1, "name": "linear"},
    {"filename": "/opt/megatfm/layers/feed_forward.py", "line": 88, "name": "forward"},
]
SNAPSHOT = {
    "segments": [{"blocks": [{"state": "active_allocated", "size": 3 << 30, "frames": FRAMES},
                             {"state": "inactive", "size": 9 << 30, "frames": FRAMES},
                             {"state": "active_pending_free", "size": 1 << 20, "frames": []}]}],
}  # fmt: skip


def write_environment(run: Path, gpu: str, processes: str = "8", machines: str | None = "1") -> None:
    facts = {"gpu": gpu, "processes": processes, "machines": machines}
    (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of GPT-2 on 8 H100s whose rank 5 ran out of memory."""
    config = load_config("gpt2-124m", ["train.micro_batch=64"])
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    write_environment(tmp_path, H100)
    steps = [{"step": n, "tokens": n, "loss": 2.0, "memory_bytes": n << 30, "step_seconds": 0.5} for n in (1, 2)]
    lines = "".join(f"{json.dumps(step)}\n" for step in steps)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "logs").mkdir()
    message = "error: rank 5 is out of memory: it held 77.3 GiB and asked for 2.50 GiB more; memory snapshot: …\n"
    (tmp_path / "logs" / "rank-5.log").write_text("…\n" * 9 + message, encoding="utf-8")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "rank-5.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    return tmp_path


def test_a_run_that_ran_out_of_memory_is_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_megatfm("explain-oom", str(run), capsys=capsys)
    assert code == 0, output
    assert "on 8 × NVIDIA H100 SXM 80 GB" in output
    assert "recorded: 2.00 GiB on rank 0 in step 2" in output
    assert "rank 5 held 77.30 GiB and asked for 2.50 GiB more; predicted for it:" in output
    assert "3.000 GiB  layers/feed_forward.py:88" in output
    assert all(phase in output for phase in ("forward", "backward", "optimizer"))
    assert "fits with train.recompute=full" in output


def test_a_rank_of_an_earlier_start_on_more_ranks_has_no_prediction(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_environment(run, H100, processes="4")
    code, output = run_megatfm("explain-oom", str(run), capsys=capsys)
    assert code == 0, output
    assert "rank 5 held 77.30 GiB and asked for 2.50 GiB more; an earlier start had more ranks than 4" in output


def test_the_device_is_the_one_of_the_run(run: Path) -> None:
    recorded = read_recorded(run)
    assert find_device(recorded) == "h100"
    assert recorded.step_seconds == 0.5
    for name, expected in (("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100"), ("none", None)):
        write_environment(run, name)
        assert find_device(read_recorded(run)) == expected


def test_numbers_of_a_damaged_run_are_left_out(run: Path) -> None:
    write_environment(run, "none", processes="eight", machines=None)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 99, "memory_bytes": Infinity}\n')
    recorded = read_recorded(run)
    assert (recorded.processes, recorded.machines) == (1, 1)
    assert (recorded.peak, recorded.peak_step) == (2 << 30, 2)


def test_a_cpu_has_to_be_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_environment(run, "none")
    output = run_megatfm("explain-oom", str(run), capsys=capsys)[1]
    assert "ran on a CPU, which is in no table of devices: name one with --device" in output


def test_the_memory_of_a_runs_tensors_does_not_depend_on_who_computed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on a CPU has no CUDA, whose memory the estimate on a GPU reserves."""
    predicted = []
    for gpu in (H100, "none"):
        write_environment(run, gpu)
        output = run_megatfm("explain-oom", str(run), "--device", "h100", capsys=capsys)[1]
        predicted += re.findall(r"predicted for its tensors: ([\d.]+)\n", output)
        assert ("Python and its libraries included" in output) == (gpu == "none")
    assert len(predicted) == 2
    assert predicted[0] == predicted[1]


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Command()), b"", b"\x80\x04N.", pickle.dumps({"segments": 3})])
def test_an_invalid_file_is_no_snapshot(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank-0.pickle").write_bytes(content)
    with pytest.raises(UsageError, match="not a memory snapshot of torch"):
        read_snapshot_owners(tmp_path / "rank-0.pickle")
    assert not (tmp_path / "ran").exists()


def test_the_report_has_the_estimate_beside_what_was_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_megatfm("report", str(run), capsys=capsys)
    assert code == 0, output
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Estimated and measured" in page
    assert '<th scope="row">step, s</th><td>0.5</td>' in page


def test_grouped_products_are_of_a_ranks_own_experts() -> None:
    """Each of 4 ranks has 2 of 8 experts, which get the rows of 2 choices of all its tokens; so has their gradient."""
    overrides = ["model.n_layers=1", "data.sequence_length=512", "train.micro_batch=2", "train.global_batch=8"]
    config = load_config("mixtral-8x7b", [*overrides, "parallel.ep=4", "parallel.dp_shard=4"])
    with open_estimator(config, load_cluster("h100", 4)) as opened:
        block = next(part for part in opened.profile(opened.base).parts if part.is_block)
    local = with_local_experts(block, 4)
    rows = 2 * 512 * 2
    d_model, d_ff = config.model.d_model, 14336
    products = [op for op in (*local.forward, *local.backward) if op.name == "_grouped_mm"]
    assert {op.dims for op in products} == {
        (2, rows // 2, d_ff, d_model),
        (2, rows // 2, d_model, d_ff),
        (2, d_ff, d_model, rows // 2),
        (2, d_model, d_ff, rows // 2),
    }
    assert all(op.flops == 2 * rows * d_model * d_ff for op in products)
    assert {max(op.reads.values()) for op in local.forward if op.name == "_grouped_mm"} == {2 * d_model * d_ff * 2}
