"""`megatfm doctor` tells the whole truth about a machine in any state, without a traceback."""

import argparse
import importlib.util
import stat
import sys
from pathlib import Path

import pytest

from megatfm.commands import doctor
from megatfm.commands.doctor import Finding, doctor_command

ARGS = argparse.Namespace()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_measure_bf16_speed", lambda device: 0.5)
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 20.0)


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def findings(look: str) -> dict[str, Finding]:
    return {one.name: one for one in doctor._run_check(doctor.SECTIONS[look], look)}


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command(ARGS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(doctor.SECTIONS)
    assert any("torch" in line and line.split()[0] == "ok" for line in lines)
    assert any("gloo" in line and line.split()[0] == "ok" for line in lines)
    assert all(" → " in line for line in lines if line.split()[0] == "missing")


def test_the_verdict_is_no_where_torch_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert doctor_command(ARGS) == 1
    printed = capsys.readouterr().out
    assert "missing torch" in " ".join(printed.split())
    assert "can't tell: ModuleNotFoundError" in printed
    assert "Disk" in printed, "what comes after must still be told"


def test_a_lock_of_a_build_that_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_get_version", lambda package: "0.19.8")
    answer = (True, "async_io|no|apt-get install libaio-dev")
    monkeypatch.setattr(doctor, "_run", lambda command, seconds=0.0: answer)
    assert "build lock" not in findings("DeepSpeed")
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr(doctor, "COMPILERS", set())
    actual = findings("DeepSpeed")["build lock"]
    assert not actual.ok
    assert str(lock) in actual.detail
    assert actual.advice == f"rm {lock}"
    assert findings("DeepSpeed")["async_io"].advice == "apt-get install libaio-dev"
    (lock.parent.parent / "async_io").mkdir()
    (lock.parent.parent / "async_io/async_io.so").touch()
    assert findings("DeepSpeed")["async_io"].detail == "compiled (megatfm doesn't need it)"


def test_an_old_torch_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, enough in {"2.9.1": False, "2.11.0": True, "3.0": True, "2.13.0+cpu": True}.items():
        monkeypatch.setattr(doctor, "_get_version", lambda name, version=version: version)
        assert findings("Python")["torch"].ok is enough


def test_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert findings("MPI")["mpirun"] == Finding(
        "mpirun", False, "not on the PATH", "make system-deps, or apt-get install openmpi-bin"
    )
    assert list(findings("SLURM")) == ["sbatch"]
    assert not findings("Packages")["chromium"].ok


def test_slurm_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sbatch", "print('slurm-wlm 22.05.8')")
    program(tmp_path, "sinfo", "print('gpu* 4\\ncpu 2')")
    monkeypatch.setenv("PATH", str(tmp_path))
    actual = findings("SLURM")
    assert actual["sbatch"].detail == "slurm-wlm 22.05.8"
    assert actual["partitions"].ok
    assert actual["partitions"].detail == "gpu* 4 nodes, cpu 2 nodes"


def test_slurm_whose_controller_hangs_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sbatch", "print('slurm-wlm 22.05.8')")
    program(tmp_path, "sinfo", "import sys; sys.exit('slurm_load_partitions: Unable to contact controller')")
    monkeypatch.setenv("PATH", str(tmp_path))
    partitions = findings("SLURM")["partitions"]
    assert (partitions.ok, partitions.detail) == (
        False,
        "slurm_load_partitions: Unable to contact controller",
    )
    program(tmp_path, "sinfo", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 0.5)
    assert findings("SLURM")["partitions"].detail == "no answer within 0.5 s"


def test_a_program_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/nowhere/interpreter\n", encoding="utf-8")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "can't be run" in findings("SLURM")["sbatch"].detail


def test_packages_of_the_test_extra_are_seen() -> None:
    actual = findings("Packages")
    assert actual["ftfy"].ok
    assert actual["ftfy"].detail.endswith("for megatfm prep")


def test_little_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_DISK", 2**80)
    assert not findings("Disk")["disk"].ok
