"""MFU: its formula, FLOPs of published models, peaks of data sheets and measured ones, and its record in a run."""

import itertools
import json
from pathlib import Path

import pytest
import torch

import megatfm
from megatfm.config import load_config
from megatfm.describe.description import describe, flops_per_token
from megatfm.tracking import utilization
from megatfm.tracking.utilization import Peak, Utilization, get_peak_flops, look_up_peak_flops, measure_peak_flops
from tests.support.small_runs import corpus, file, run, texts

__all__ = ["corpus", "file", "run", "texts"]  # fixtures


def test_mfu_is_the_ratio_of_needed_to_possible_flops() -> None:
    used = Utilization(flops_per_token=6e9, causal_flops_per_token=5e9, peak=Peak(1e15, "x"), devices=8)
    assert used.compute_mfu(1e6) == {"mfu": pytest.approx(0.75), "mfu_causal": pytest.approx(0.625)}


def test_other_processes_do_not_lower_a_cpu_s_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul takes 20 ms of CPU time and 30 ms by the clock."""
    ticks = {"process_time": itertools.count(0, 0.02), "perf_counter": itertools.count(0, 0.03)}
    for name, times in ticks.items():
        monkeypatch.setattr(utilization.time, name, lambda times=times: next(times))
    flops = measure_peak_flops(torch.device("cpu"), torch.float32, "x").flops
    seconds = 0.02 / torch.get_num_threads()
    assert flops == pytest.approx(2 * utilization.MATMUL_SIZE**3 / seconds)


def test_a_process_that_is_paused_before_the_first_matmul_measures_it_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count()
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: float(next(times)))
    assert measure_peak_flops(torch.device("cpu"), torch.float32, "x").flops > 0


def test_flops_of_gpt3_equal_its_paper() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs on 300 billion tokens, without attention's products."""
    full, causal = flops_per_token(load_config("gpt3-175b", ["model.vocab_size=50257"]))
    assert 3.14e23 / 300e9 < causal < full < 1.1 * 3.14e23 / 300e9
    model = describe(load_config("gpt3-175b", ["model.vocab_size=50257"])).config.model
    dense = model.n_layers // 2  # the others are banded, whose pairs are those that are seen
    attention = 12 * dense * model.d_model * 2048
    assert full - causal == pytest.approx(attention / 2, rel=1e-6)


def test_recomputation_does_not_count_in_mfu() -> None:
    words = (["model.vocab_size=50257", f"train.recompute={how}"] for how in ("none", "full"))
    plain, again = (load_config("gpt2", overrides) for overrides in words)
    assert flops_per_token(plain) == flops_per_token(again)


@pytest.mark.parametrize(("name", "dtype", "flops"), [
    ("NVIDIA H200", torch.bfloat16, 989e12),
    ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
    ("NVIDIA H100 PCIe", torch.float16, 756e12),
    ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
    ("Tesla V100-SXM2-32GB", torch.float16, 125e12),
    ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
    ("NVIDIA L4", torch.bfloat16, 121e12),
    ("NVIDIA L40", torch.bfloat16, None),
    ("NVIDIA H200", torch.float32, None),
    ("NVIDIA H200 NVL", torch.bfloat16, 835e12),
    ("NVIDIA GH200 480GB", torch.bfloat16, 989e12),
    ("AMD Instinct MI250X", torch.bfloat16, 191.5e12),  # one of two dies, as torch sees it
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, None),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", torch.float16, None),
    ("GRID A100-4C", torch.bfloat16, None),
    ("Tesla V100-PCIE-32GB", torch.float16, 112e12),
    ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165e12),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
    ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
    ("NVIDIA GeForce RTX 3090 Ti", torch.float16, None),
])  # fmt: skip
def test_peak_flops_equal_the_data_sheets(name: str, dtype: torch.dtype, flops: float | None) -> None:
    assert look_up_peak_flops(name, dtype) == flops


def test_the_peak_of_a_cpu_is_measured() -> None:
    peak_flops = get_peak_flops(torch.device("cpu"), torch.float32)
    assert peak_flops.flops > 1e8
    assert "CPU, float32" in peak_flops.source
    assert "measured" in str(peak_flops)


def test_a_run_records_mfu(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    full, causal = flops_per_token(megatfm.load_config(run))
    for line in lines:
        assert line["mfu"] > line["mfu_causal"] > 0
        assert line["mfu"] / line["mfu_causal"] == pytest.approx(full / causal)
    assert "measured" in json.loads((run / "environment.json").read_text())["peak"]
    log = (run / "logs" / "rank-0.log").read_text()
    assert "MFU is relative to" in log
    assert " % causal)" in log
