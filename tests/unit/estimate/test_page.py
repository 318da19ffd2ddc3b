"""The page of an estimate, by hand and as a parser of HTML sees it, the written config, and measured tables."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatfm.commands.estimate import _print_traced_step
from megatfm.config import Config, load_config
from megatfm.errors import UsageError
from megatfm.estimate import calibrate, trial_configs, trials
from megatfm.estimate.clock import measure_in_turns
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.export import (
    WIDTH,
    ScalePoint,
    compute_scaling_lines,
    draw_memory,
    draw_timeline,
    make_launch_arguments,
    render_layout_config,
    write_estimate_page,
    write_layout,
)
from megatfm.estimate.operators import Operator
from megatfm.estimate.roofline import (
    estimate_attention_seconds,
    estimate_elementwise_seconds,
    estimate_matmul_seconds,
    interpolate_rate,
)
from megatfm.estimate.traced import Traced
from tests.support.forked_commands import run_command


class Reader(HTMLParser):
    """Collects tags, texts and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def make_traced(compiled: bool) -> Traced:
    facts: dict[str, Any] = {"rank": 0, "world": 8, "microbatches": 2, "weights": 1, "passes": 10**9, "optimizer": 1}
    facts |= {"sent": [], "seconds": 1.0, "largest": ""} | {key: {} for key in ("kernels", "waits", "all_pairs")}
    facts |= {"at_peak": {}, "is_compiled": compiled, "saved": {f"decoder.layers.{i}": 10**9 for i in range(3)}}
    facts |= {"graph_breaks": {"layers/block.py:64: skipped": 2}, "recompilations": {"layers/block.py:43: key": 1}}
    return Traced(facts)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_trace_names_the_blocks_that_it_compiles(
    compiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled or not, the table's estimate is of blocks as they are traced."""
    traced = list[Config]()

    def trace(source: str, overrides: Sequence[str], *_: int) -> Traced:
        traced.append(load_config(source, overrides))
        return make_traced(compiled)

    monkeypatch.setattr("megatfm.estimate.traced.run_trace", trace)
    words = ["estimate", "gpt2-124m", "--gpus", "8", "--traced", "model.n_layers=3"]
    run_command(*words, f"train.compile={str(compiled).lower()}")
    shown = capsys.readouterr().out
    assert [config.train.compile for config in traced] == [compiled]
    line = "blocks compiled up to their graphs: 3 of decoder.layers: 2 graph breaks, 1 recompilation"
    assert (line in shown) == compiled
    assert ("graph break 2 ×: layers/block.py:64: skipped" in shown) == compiled
    assert ("compiled again 1 ×: layers/block.py:43: key" in shown) == compiled
    assert re.search(r"saved by blocks\W+\d\.\d+\W+3\.000", shown)


def test_json_is_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatfm.estimate.traced.run_trace", lambda *_: make_traced(False))
    words = ["estimate", "gpt2-124m", "--json", "--traced", "--write", "job.toml", "--html", "page.html"]
    run_command(*words, "model.n_layers=3", "train.compile=false")
    output = capsys.readouterr()
    assert "sent" in json.loads(output.out)
    for text in ("written: page.html", "saved by blocks", "written: job.toml"):
        assert text in output.err


def test_a_page_has_memory_schedule_and_scaling(tmp_path: Path) -> None:
    overrides = ["parallel.pp=4", "parallel.zero=1", "train.global_batch=64", "train.micro_batch=1"]
    config = load_config("gpt2-124m", overrides)
    with open_estimator(config, load_cluster("h100", 8)) as opened:
        estimate = opened.estimate(opened.base)
        write_estimate_page(opened, estimate, tmp_path / "page.html")
        with pytest.raises(UsageError, match="the file exists"):
            write_estimate_page(opened, estimate, tmp_path / "page.html")
    memory, timeline = draw_memory(estimate), draw_timeline(estimate)
    assert timeline is not None
    n_parts = 7
    assert len(memory.boxes) == 4 * n_parts
    for rank, rank_memory in zip(range(4), estimate.memory, strict=True):
        widths = [box.width for box in memory.boxes[rank * n_parts : (rank + 1) * n_parts]]
        assert sum(rank_memory.parts.values()) == rank_memory.total
        assert memory.limit is not None
        share = rank_memory.total / estimate.cluster.device.memory_bytes
        assert sum(widths) == pytest.approx(memory.limit * share)
    assert len(timeline.boxes) == 4 * 32 * 2  # 32 micro-batches of each of two data ranks, both passes
    assert max(box.x + box.width for box in timeline.boxes) == pytest.approx(WIDTH)
    reader = Reader()
    reader.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert reader.tags.count("rect") == len(memory.boxes) + len(timeline.boxes)
    assert reader.tags.count("polyline") == 2
    assert reader.addresses == ["data:,"]
    assert "gpt2-124m, estimated" in reader.texts
    assert "fits" in reader.texts
    caption = "Tokens a second by number of GPUs, both axes logarithmic; dashed: in proportion to the GPUs."
    assert caption in reader.texts, "the curve says what it shows, and below it from where to where"
    ends = [text for text in reader.texts if re.fullmatch(r"[\d,]+ GPUs: [\d,]+", text)]
    assert [text.partition(":")[0] for text in ends] == ["4 GPUs", "64 GPUs"]
    assert list(timeline.legend.values()) == ["forward", "backward"], "what the schedule has"
    assert timeline.min_width == 8 * 32 * 2, "passes are seen in a narrow window, too, which scrolls"


def test_scaling_lines_of_a_run_that_scales_perfectly_are_one() -> None:
    points = [ScalePoint(gpus, 100.0 * gpus) for gpus in (2, 4, 32)]
    curve, ideal = compute_scaling_lines(points)
    assert ideal == [pytest.approx((0, 100)), pytest.approx((100, 0))]
    assert curve == [pytest.approx((0, 100)), pytest.approx((25, 75)), pytest.approx((100, 0))]
    assert compute_scaling_lines(points[:1]) == ([], [])


def test_the_written_config_is_the_chosen_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("written")
    with open_estimator(load_config("gpt2-124m", []), load_cluster("h100", 8), (1, 2)) as small:
        chosen = small.base.with_changes({"parallel.tp": 2, "parallel.zero": 1, "train.micro_batch": 4})
        estimate = small.estimate(chosen)
    write_layout("gpt2-124m", estimate, folder / "best.toml")
    text = render_layout_config("gpt2-124m", estimate)
    assert "tp = 2" in text
    assert load_config(str(folder / "best.toml"), []).parallel == estimate.config.parallel
    with pytest.raises(UsageError, match="the file exists"):
        write_layout("gpt2-124m", estimate, folder / "best.toml")


def test_the_traced_layout_is_the_estimated_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found by a search, say, and in its precision; the written config keeps a precision that is not the device's."""
    traced = list[tuple[Config, int]]()

    def trace(source: str, overrides: Sequence[str], gpus: int, rank: int) -> Traced:
        traced.append((load_config(source, overrides), rank))
        raise InterruptedError

    monkeypatch.setattr("megatfm.estimate.traced.run_trace", trace)
    args: Any = SimpleNamespace(config="gpt2-124m", overrides=["train.precision=fp32"], gpus=8, rank=5)
    with open_estimator(load_config("gpt2-124m", ["train.precision=fp32"]), load_cluster("h100", 8), (1, 2)) as opened:
        estimate = opened.estimate(opened.base.with_changes({"parallel.tp": 2, "train.micro_batch": 4}))
        with pytest.raises(InterruptedError):
            _print_traced_step(args, opened, estimate)
    [(config, rank)] = traced
    assert (config.parallel.tp, config.train.micro_batch, config.train.precision, rank) == (2, 4, "fp32", 5)
    write_layout("gpt2-124m", estimate, tmp_path / "best.toml")
    assert load_config(str(tmp_path / "best.toml"), []).train.precision == "fp32"


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(7, 1, 7), (12, 2, 6), (16, 2, 8)])
def test_a_job_starts_as_many_ranks_as_were_estimated(gpus: int, nodes: int, per_node: int) -> None:
    arguments = make_launch_arguments(Path("best.toml"), load_cluster("h100", gpus))
    assert arguments == ["best.toml", "--slurm", "--nodes", str(nodes), "--gpus-per-node", str(per_node)]


def test_gpus_that_do_not_divide_over_nodes_get_no_job() -> None:
    with pytest.raises(UsageError, match="13 GPUs do not divide over 2 nodes: choose --gpus 12 or 14"):
        make_launch_arguments(Path("best.toml"), load_cluster("h100", 13))


# ------------------------------------------------------------------------------------------------ calibration


def seconds_of(m: int, n: int, k: int) -> float:
    """A machine whose rate grows as powers of the sizes."""
    return 2 * m * n * k / (1e9 * m**0.3 * n**0.1 * k**0.2)


TABLE = [[m, n, k, seconds_of(m, n, k)] for m in (8, 64, 512) for n in (8, 64, 512) for k in (8, 64, 512)]


@pytest.mark.parametrize("shape", [(64, 8, 512), (100, 33, 200), (9, 500, 21)])
def test_rates_of_other_shapes_lie_on_the_machines_law(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    assert 2 * m * n * k / interpolate_rate(TABLE, m, n, k) == pytest.approx(seconds_of(m, n, k), rel=1e-6)


def test_beyond_the_table_rates_stay() -> None:
    fastest = max(2 * m * n * k / seconds for m, n, k, seconds in TABLE)
    assert interpolate_rate(TABLE, 2**20, 2**20, 2**20) <= fastest * (1 + 1e-12)


def test_measured_times_come_before_the_roofline() -> None:
    device = replace(
        load_cluster("h100", 1).device, products={"bf16": TABLE}, moves=[(2**10, 1e-6), (2**20, 1e-3)],
        operators={"gelu(tanh)": [(2**20, 5e-3), (2**20, 7e-3)]}, attention_backward=0.5,
    )  # fmt: skip
    product = Operator("bmm", "matmul", 0.0, {}, {}, (3, 64, 8, 512))
    assert estimate_matmul_seconds(device, product) == pytest.approx(3 * seconds_of(64, 8, 512))

    def moved(name: str, n_bytes: int) -> float:
        return estimate_elementwise_seconds(device, Operator(name, "pointwise", 0.0, {1: n_bytes}, {}, variant=name))

    assert moved("add", 2**20) == pytest.approx(1e-3)
    assert moved("add", 2**15) == pytest.approx(math.sqrt(1e-6 * 1e-3))
    slope = (1e-3 - 1e-6) / (2**20 - 2**10)
    assert moved("add", 2**23) == pytest.approx(1e-3 + 7 * 2**20 * slope), "slower than memory"
    beyond = 7 * 2**20 / (device.memory_bandwidth * device.memory_efficiency)
    assert moved("gelu(tanh)", 2**23) == pytest.approx(6e-3 + beyond), "measured at one size"
    assert moved("add", 2**8) == pytest.approx(1e-6), "no time below the launch's"
    assert moved("gelu(tanh)", 2**19) == pytest.approx((6e-3 + device.launch_seconds) / 2)
    assert moved("add", 1) == pytest.approx(1e-6)
    assert moved("gelu(tanh)", 2**20) == pytest.approx(6e-3)
    attention = Operator("attention", "attention", 1e15, {}, {})
    assert estimate_attention_seconds(device, replace(attention, is_backward=True)) == pytest.approx(
        2 * estimate_attention_seconds(device, attention)
    )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a moment, and no processes."""
    monkeypatch.setattr(calibrate, "MATMUL_SIZES", {"cpu": (16, 32)})
    monkeypatch.setattr(calibrate, "MOVED_BYTES", {"cpu": (2**12, 2**21)})
    monkeypatch.setattr(trials, "measure_in_turns", partial(measure_in_turns, rounds=3))
    link = {"name": "none", "bandwidth": 1e9, "efficiency": 1.0, "latency": 1e-5}
    monkeypatch.setattr(calibrate, "measure_link", lambda kind: link)
    sizes = ("model.n_layers=1", "model.d_model=64", "model.attention.n_heads=2", "model.vocab_size=128")
    trial = load_config("gpt2-124m", [*sizes, "data.sequence_length=32", "train.micro_batch=1", "train.global_batch=1"])
    settings = {"train.device": "cpu", "train.precision": "fp32", "train.compile": False}
    monkeypatch.setattr(trial_configs, "list_trials", lambda config, kind, precision: [trial.with_changes(settings)])


@pytest.mark.usefixtures("few")
def test_the_written_table_is_used_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, words = tmp_path / "here.toml", ("estimate", "gpt2-124m", "train.micro_batch=1", "train.global_batch=1")
    assert run_command(*words, "--calibrate", str(path), "train.precision=fp32") == 0
    assert "on 1 × " in capsys.readouterr().out
    cluster = load_cluster("here", 1, hardware=path)
    assert {"fp32", "fp32 nn", "fp32 tn"} <= set(cluster.device.products)
    assert len(cluster.device.products["fp32"]) > 8, "a grid of 8 shapes, and those of the trial"
    assert "gelu(tanh)" in cluster.device.operators
    assert cluster.device.host_seconds >= 0
    assert cluster.device.update_seconds is not None
    assert not cluster.device.compiles
    assert cluster.device.moves[1][0] == 2**21
    assert run_command(*words, "--hardware", str(path), "--device", "here", "--gpus", "1", "train.precision=bf16") == 2
    assert "or measure it so: --calibrate FILE train.precision=bf16" in capsys.readouterr().err
    assert run_command(*words, "--hardware", str(path), "--device", "here", "--gpus", "1", "train.precision=fp64") == 2
    assert "measure it so" not in capsys.readouterr().err, "it measures in bf16 and fp32 alone"
    assert run_command(*words, "--calibrate", str(path)) == 2
    assert "the file exists" in capsys.readouterr().err
    assert run_command(*words, "--calibrate", str(tmp_path / "other"), "train.precision=fp64") == 2
    assert "measures in bf16 or fp32" in capsys.readouterr().err


def test_products_that_take_too_long_are_left_out() -> None:
    shapes = calibrate.list_matmul_shapes("cpu")
    assert (2048, 2048, 768) in shapes
    assert (2048, 2048, 2048) not in shapes


@pytest.mark.slow
def test_the_link_between_two_processes_is_measured() -> None:
    link = calibrate.measure_link("cpu")
    assert 1e7 < link["bandwidth"] < 1e12
    assert 0 < link["latency"] < 1


def test_a_rank_of_the_link_takes_memory_on_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses GPU 3 and chooses none has a context on GPU 0, too."""
    calls: list[object] = []
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def init_process_group(*_: object, **__: object) -> None:
        calls.append("group")
        raise InterruptedError

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(InterruptedError):
        calibrate._exchange(3, 4, "nccl", store.port, None)
    assert calls == [torch.device("cuda", 3), "group"]


def test_onednn_keeps_the_kernels_of_a_calibration_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, expected in ((None, "65536"), ("12", "12")):
        monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
        if value:
            monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", value)
        calibrate.keep_kernels()
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == expected
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
