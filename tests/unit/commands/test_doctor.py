"""`megatfm doctor`: what a machine lacks, and programs that fail or hang."""

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
def skip_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_measure_bf16_speed", lambda device: 0.5)
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 20.0)


def write_program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_check(section: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor._run_check(doctor.SECTIONS[section], section)}


def test_doctor_passes_on_a_machine_that_can_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert doctor_command(ARGS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(doctor.SECTIONS)
    assert any("torch" in line and line.split()[0] == "ok" for line in lines)
    assert any("gloo" in line and line.split()[0] == "ok" for line in lines)
    assert all(" → " in line for line in lines if line.split()[0] == "missing")


def test_doctor_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that is too long goes on below what was found."""
    long = Finding("sbatch", False, "sbatch: fatal: Could not establish a source", "run it where jobs are submitted")
    monkeypatch.setattr(doctor, "SECTIONS", {"SLURM": lambda: iter([long])})
    monkeypatch.setenv("COLUMNS", "80")
    doctor_command(ARGS)
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(" " * 26) for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"missing sbatch {long.detail} → {long.advice}"


def test_doctor_fails_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert doctor_command(ARGS) == 1
    printed = capsys.readouterr().out
    assert "missing torch" in " ".join(printed.split())
    assert "can't tell: ModuleNotFoundError" in printed
    assert "Disk" in printed, "later sections must still be reported"


def test_doctor_refuses_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, enough in {"2.9.1": False, "2.11.0": True, "3.0": True, "2.13.0+cpu": True}.items():
        monkeypatch.setattr(doctor, "_get_version", lambda name, version=version: version)
        assert run_check("Python")["torch"].ok is enough


def test_doctor_reports_missing_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check("MPI")["mpirun"] == Finding(
        "mpirun", False, "not on the PATH", "make system-deps, or apt-get install openmpi-bin"
    )
    assert list(run_check("SLURM")) == ["sbatch"]
    assert not run_check("Packages")["chromium"].ok


def test_doctor_lists_slurm_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "sbatch", "print('slurm-wlm 22.05.8')")
    write_program(tmp_path, "sinfo", "print('gpu* 4\\ncpu 2')")
    monkeypatch.setenv("PATH", str(tmp_path))
    actual = run_check("SLURM")
    assert actual["sbatch"].detail == "slurm-wlm 22.05.8"
    assert actual["partitions"].ok
    assert actual["partitions"].detail == "gpu* 4 nodes, cpu 2 nodes"


def test_doctor_reports_a_slurm_controller_that_hangs_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "sbatch", "print('slurm-wlm 22.05.8')")
    write_program(tmp_path, "sinfo", "import sys; sys.exit('slurm_load_partitions: Unable to contact controller')")
    monkeypatch.setenv("PATH", str(tmp_path))
    partitions = run_check("SLURM")["partitions"]
    assert (partitions.ok, partitions.detail) == (False, "slurm_load_partitions: Unable to contact controller")
    write_program(tmp_path, "sinfo", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 0.5)
    assert run_check("SLURM")["partitions"].detail == "no answer within 0.5 s"


def test_doctor_reports_a_program_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/nowhere/interpreter\n", encoding="utf-8")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "can't be run" in run_check("SLURM")["sbatch"].detail


def test_doctor_finds_installed_packages() -> None:
    actual = run_check("Packages")
    assert actual["ftfy"].ok
    assert actual["ftfy"].detail.endswith("for megatfm prep")


def test_doctor_reports_little_free_disk_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_DISK", 2**80)
    assert not run_check("Disk")["disk"].ok
