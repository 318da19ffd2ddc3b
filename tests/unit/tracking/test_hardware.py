"""The hardware and software that a run records, and how changes of it are described at a resume."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm.checkpoint import metadata
from megatfm.tracking import hardware
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
