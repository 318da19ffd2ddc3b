"""The hardware and software that a run records, and how changes of it are described at a resume."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatfm
from megatfm.checkpoint import metadata
from megatfm.config import load_config
from megatfm.describe.description import describe, flops_per_token
from megatfm.tracking import hardware, utilization
from megatfm.tracking.utilization import Peak, Utilization, get_peak_flops, look_up_peak_flops, measure_peak_flops
from tests.support.files import read_lines
from tests.support.small_runs import corpus, file, run, texts
from tests.support.workers import THREADS, Workers

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC 9575F
stepping\t: 1
flags\t\t: fpu sse4_1 avx avx2 avx512f fma svm

processor\t: 1
model name\t: another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd sve2 crc32\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"


@pytest.mark.parametrize(("text", "cpu", "sets"), [
    (X86, "AuthenticAMD, 26, 2, AMD EPYC 9575F, 1", "avx avx2 avx512f fma sse4_1"),
    (ARM, "0x41, 0xd4f", "asimd sve2"),
])  # fmt: skip
def test_processor_name_and_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cpu: str, sets: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    name = hardware.describe_processor()
    assert (name["cpu"], name["instruction sets"]) == (cpu, sets)
    assert name["threads"] == str(torch.get_num_threads())


def test_processor_has_a_name_without_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    assert hardware.describe_processor()["cpu"]


def test_libraries_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hardware.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    libraries = hardware.list_libraries()
    assert libraries["torch"] == torch.__version__
    assert libraries["settings"] == "none"
    assert libraries.keys() & {"MKL", "BLAS"}
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert hardware.list_libraries()["settings"] == "MKL_CBWR=AVX2"


@pytest.mark.parametrize("capability", ["default", pytest.param("avx2", marks=pytest.mark.extended)])
def test_the_kernels_that_torch_chose_are_recorded(capability: str) -> None:
    code = "from megatfm.tracking.hardware import describe_processor; print(describe_processor()['kernels'])"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() != "AVX512"
    if capability == "default":
        assert done.stdout.strip() in ("DEFAULT", "NO AVX")


ONE, OTHER = {"cpu": "a", "threads": "1"}, {"cpu": "a", "threads": "2"}


def test_differences_by_rank() -> None:
    same = {"kinds": [ONE], "of_rank": [0, 0]}
    assert hardware.diff_hardware(same, same) == []
    other_layout = {"kinds": [ONE], "of_rank": [0, 0, 0, 0]}
    assert hardware.diff_hardware(same, other_layout) == []
    assert hardware.diff_hardware(same, {"kinds": [OTHER], "of_rank": [0, 0]}) == ["threads: 1 → 2"]
    mixed = {"kinds": [ONE, OTHER], "of_rank": [0, 1]}
    assert hardware.diff_hardware(same, mixed) == ["threads: 1 → 2 (on rank 1)"]
    turned = {"kinds": [OTHER, ONE], "of_rank": [0, 1]}
    assert hardware.diff_hardware(mixed, turned) == ["threads: 1 → 2 (on rank 0)", "threads: 2 → 1 (on rank 1)"]
    more = {"kinds": [{**ONE, "MKL": "2024.2"}], "of_rank": [0, 0]}
    assert hardware.diff_hardware(same, more) == ["MKL: none → 2024.2"]


@pytest.mark.parametrize("record", [
    None, [], "x", {}, {"kinds": [ONE]}, {"kinds": [ONE], "of_rank": [1]}, {"kinds": [ONE], "of_rank": [-1]},
    {"kinds": [], "of_rank": [0]}, {"kinds": {}, "of_rank": [0]}, {"kinds": [ONE], "of_rank": ["0"]},
    {"kinds": [1], "of_rank": [0]}, {"kinds": [{"instruction sets": 3}], "of_rank": [0]},
    {"kinds": 1, "of_rank": 1},
])  # fmt: skip
def test_a_damaged_record_is_a_difference(record: Any) -> None:
    """An edited checkpoint resumes."""
    actual = hardware.diff_hardware(record, {"kinds": [ONE], "of_rank": [0]})
    assert actual == ["the checkpoint's record of them is damaged"]


def test_changed_instruction_sets_are_listed() -> None:
    def having(sets: str) -> hardware.HardwareByRank:
        return {"kinds": [{"instruction sets": sets}], "of_rank": [0]}

    assert hardware.diff_hardware(having("avx avx2 fma"), having("avx avx2 amx_tile")) == [
        "instruction sets: without fma, with amx_tile"
    ]
    assert hardware.diff_hardware(having("avx avx512f"), having("avx")) == ["instruction sets: without avx512f"]


def gather_hardware_of_ranks() -> dict[str, object]:
    if int(os.environ["RANK"]) == 1:
        torch.set_num_threads(3)
    return hardware.gather_hardware(torch.device("cpu"))


def test_hardware_is_gathered_from_all_ranks(workers: Workers) -> None:
    for result in workers.run(gather_hardware_of_ranks, 3):
        assert metadata.check_json_round_trip({"machines": result}), "a checkpoint can hold it"
        assert result["of_rank"] == [0, 1, 0]
        assert [kind["threads"] for kind in result["kinds"]] == [str(THREADS), "3"]
        assert result["kinds"][0].keys() >= {
            "cpu", "instruction sets", "kernels", "threads", "torch", "settings",
        }  # fmt: skip


def test_a_run_on_cpus_does_not_query_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking makes a CUDA context, which takes some hundred MB of somebody else's GPU."""

    def ask(*args: object) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_device_name", "init", "_lazy_init", "current_device"):
        monkeypatch.setattr(torch.cuda, name, ask)
    assert hardware.describe_environment(torch.device("cpu"))["gpu"] == "none", "the run has none"
    with pytest.raises(AssertionError, match="asked"):
        hardware.describe_environment(torch.device("cuda"))


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


def test_other_processes_do_not_choose_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock counts hours during float32, in which others ran; the thread's own clock does not."""
    cpu_seconds, hours = itertools.count(), itertools.accumulate(itertools.chain([3600.0] * 16, itertools.repeat(1.0)))
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: next(hours))
    monkeypatch.setattr(utilization.time, "thread_time", lambda: next(cpu_seconds))
    assert utilization.measure_bf16_speedup(torch.device("cpu")) == 1


def test_a_process_that_is_paused_before_the_first_matmul_measures_it_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count()
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: float(next(times)))
    assert measure_peak_flops(torch.device("cpu"), torch.float32, "x").flops > 0


@pytest.mark.parametrize(("kind", "dtype", "is_slow"), [
    ("cpu", torch.bfloat16, True), ("cpu", torch.float16, True), ("cpu", torch.float64, False),
    ("cuda", torch.bfloat16, False),
])  # fmt: skip
def test_a_cpu_without_instructions_for_16_bits_is_named(
    kind: str, dtype: torch.dtype, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utilization, "measure_peak_flops", lambda device, dtype, name: Peak(6e10, name))
    warning = utilization.find_slow_dtype(Peak(1e9, "x"), torch.device(kind), dtype)
    assert (warning or "").startswith("matmuls take 60 times as long in") == is_slow
    assert utilization.find_slow_dtype(Peak(3e10, "x"), torch.device(kind), dtype) is None


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
    lines = read_lines(run / "metrics.jsonl")
    full, causal = flops_per_token(megatfm.load_config(run))
    for line in lines:
        assert line["mfu"] > line["mfu_causal"] > 0
        assert line["mfu"] / line["mfu_causal"] == pytest.approx(full / causal)
    assert "measured" in json.loads((run / "environment.json").read_text())["peak"]
    log = (run / "logs" / "rank-0.log").read_text()
    assert "MFU is relative to" in log
    assert " % causal)" in log
