"""The machine's notes in a run, the line when it goes on upon another, and MFU by both conventions."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatfm
from megatfm.checkpoint import metadata
from megatfm.config import load_config
from megatfm.describe.description import describe, flops_per_token
from megatfm.tracking import hardware
from megatfm.tracking.hardware import Peak, Utilization, get_peak_flops, look_up_peak_flops
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


@pytest.mark.parametrize(
    ("text", "cpu", "sets"),
    [
        (X86, "AuthenticAMD, 26, 2, AMD EPYC 9575F, 1", "avx avx2 avx512f fma sse4_1"),
        (ARM, "0x41, 0xd4f", "asimd sve2"),
    ],
)
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


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_kernels_that_torch_takes_are_noted(capability: str) -> None:
    code = "from megatfm.tracking.hardware import describe_processor; print(describe_processor()['kernels'])"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(Path(__file__).parents[3])}
    completed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() != "AVX512"
    if capability == "default":
        assert completed.stdout.strip() in ("DEFAULT", "NO AVX")


ONE, OTHER = {"cpu": "a", "threads": "1"}, {"cpu": "a", "threads": "2"}


def test_differences_by_rank() -> None:
    same = {"kinds": [ONE], "of_rank": [0, 0]}
    assert hardware.diff_hardware(same, same) == []
    assert hardware.diff_hardware(same, {"kinds": [ONE], "of_rank": [0, 0, 0, 0]}) == [], (
        "other ranks are another layout"
    )
    assert hardware.diff_hardware(same, {"kinds": [OTHER], "of_rank": [0, 0]}) == ["threads: 1 → 2"]
    mixed = {"kinds": [ONE, OTHER], "of_rank": [0, 1]}
    assert hardware.diff_hardware(same, mixed) == ["threads: 1 → 2 (on rank 1)"]
    turned = {"kinds": [OTHER, ONE], "of_rank": [0, 1]}
    assert hardware.diff_hardware(mixed, turned) == [
        "threads: 1 → 2 (on rank 0)",
        "threads: 2 → 1 (on rank 1)",
    ]
    more = {"kinds": [{**ONE, "MKL": "2024.2"}], "of_rank": [0, 0]}
    assert hardware.diff_hardware(same, more) == ["MKL: none → 2024.2"]


def test_instruction_sets_are_told_by_what_came_and_went() -> None:
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


def test_all_ranks_know_the_kinds_of_all(workers: Workers) -> None:
    for result in workers.run(gather_hardware_of_ranks, 3):
        assert metadata.check_json_round_trip({"machines": result}), "a checkpoint can hold it"
        assert result["of_rank"] == [0, 1, 0]
        assert [kind["threads"] for kind in result["kinds"]] == [str(THREADS), "3"]
        assert result["kinds"][0].keys() >= {
            "cpu", "instruction sets", "kernels", "threads", "torch", "settings",
        }  # fmt: skip


def test_a_run_on_cpus_asks_no_gpu_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_utilization_is_what_is_needed_over_what_could_be_done() -> None:
    used = Utilization(flops_per_token=6e9, causal_flops_per_token=5e9, peak=Peak(1e15, "x"), devices=8)
    assert used.compute_mfu(1e6) == {"mfu": pytest.approx(0.75), "mfu_causal": pytest.approx(0.625)}


def test_other_work_on_a_cpu_does_not_lower_the_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product takes 20 ms of the processor, and half as long again by the clock."""
    ticks = {"process_time": itertools.count(0, 0.02), "perf_counter": itertools.count(0, 0.03)}
    for name, times in ticks.items():
        monkeypatch.setattr(hardware.time, name, lambda times=times: next(times))
    flops = hardware.measure_peak_flops(torch.device("cpu"), torch.float32, "x").flops
    item = 0.02 / torch.get_num_threads()
    assert flops == pytest.approx(2 * hardware.MATMUL_SIZE**3 / item)


def test_gpt3_needs_what_its_paper_says() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs on 300 billion tokens, without attention's products."""
    full, causal = flops_per_token(load_config("gpt3-175b", ["model.vocab_size=50257"]))
    assert 3.14e23 / 300e9 < causal < full < 1.1 * 3.14e23 / 300e9
    model = describe(load_config("gpt3-175b", ["model.vocab_size=50257"])).config.model
    dense = model.n_layers // 2  # the others are banded, whose pairs are those that are seen
    attention = 12 * dense * model.d_model * 2048
    assert full - causal == pytest.approx(attention / 2, rel=1e-6)


def test_recomputation_counts_in_neither() -> None:
    plain, recomputed = (
        load_config("gpt2", ["model.vocab_size=50257", f"train.recompute={how}"]) for how in ("none", "full")
    )
    assert flops_per_token(plain) == flops_per_token(recomputed)


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
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
    ],
)
def test_peak_flops_are_those_of_data_sheets(name: str, dtype: torch.dtype, flops: float | None) -> None:
    assert look_up_peak_flops(name, dtype) == flops


def test_a_cpu_is_measured_and_says_so() -> None:
    peak_flops = get_peak_flops(torch.device("cpu"), torch.float32)
    assert peak_flops.flops > 1e8
    assert "CPU, float32" in peak_flops.source
    assert "measured" in str(peak_flops)


def test_a_run_records_it(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    full, causal = flops_per_token(megatfm.load_config(run))
    for line in lines:
        assert line["mfu"] > line["mfu_causal"] > 0
        assert line["mfu"] / line["mfu_causal"] == pytest.approx(full / causal)
    assert "measured" in json.loads((run / "environment.json").read_text())["peak"]
    log = (run / "logs" / "rank-0.log").read_text()
    assert "MFU is relative to" in log
    assert " % causal)" in log
