"""`megatfm doctor`: checks what this machine can run, and says how to install what is missing."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatfm.terminal import wrap_line

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
ANSWER_SECONDS = 10.0
ENOUGH_DISK = 10 * 10**9

OPTIONAL = {
    "wandb": ("log.sinks = ['wandb']", "pip install 'megatfm[wandb]'"),
    "ftfy": ("megatfm prep", "pip install 'megatfm[prep]'"),
    "rensa": ("megatfm prep", "pip install 'megatfm[prep]'"),
    "deepspeed": ("parallel.engine = 'deepspeed'", "make deepspeed"),
    "grouped_gemm": ("experts on GPUs by MegaBlocks' kernel instead of torch's", "make moe"),
}
"""Package → (purpose, way to install it)."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: its subject, what was found, and how to get what is missing."""

    name: str
    ok: bool
    detail: str
    advice: str = ""
    required: bool = False


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def doctor_command(args: argparse.Namespace) -> int:
    """Print a line for each check; return 1 if something required is missing, else 0."""
    missing = 0
    for section, check in SECTIONS.items():
        print(section)
        for finding in _run_check(check, section):
            advice = f"  → {finding.advice}" if finding.advice and not finding.ok else ""
            line = f"  {'ok' if finding.ok else 'missing':<8}{finding.name:<16}{finding.detail}{advice}"
            print(wrap_line(line, indent=26))
            missing += finding.required and not finding.ok
    return 1 if missing else 0


def _run_check(check: Callable[[], Iterator[Finding]], section: str) -> Iterator[Finding]:
    """Run a check; an exception becomes a finding, so that the report is always complete."""
    try:
        yield from check()
    except Exception as error:
        text = " ".join(str(error).split())
        yield Finding(section.lower(), False, f"can't tell: {type(error).__name__}: {text}")


def check_python() -> Iterator[Finding]:
    """Check the interpreter, torch and the processor."""
    current, oldest = sys.version_info[:2], ".".join(map(str, OLDEST_PYTHON))
    yield Finding("Python", current >= OLDEST_PYTHON, platform.python_version(), f"install {oldest}", required=True)
    version = _get_version("torch")
    yield Finding(
        "torch",
        bool(version) and _parse_version(version) >= OLDEST_TORCH,
        version or "not installed",
        "pip install -c constraints.txt megatfm",
        required=True,
    )
    yield Finding("processor", True, f"{os.cpu_count()} cores, {platform.machine()}")
    if version:
        ratio = _measure_bf16_speed("cpu")
        yield Finding("bf16 on it", ratio > 1, f"{ratio:.1f} × as fast as fp32", "train.precision=fp32 is faster here")


def check_gpus() -> Iterator[Finding]:
    """Check the GPUs that torch sees, and its communication backends."""
    import torch
    import torch.distributed as dist

    from megatfm.ops.fp8 import multiplies_fp8

    count = torch.cuda.device_count()
    build = torch.version.cuda and f"CUDA {torch.version.cuda}"
    reason = "torch sees none" if build else "this torch is built without CUDA"
    yield Finding("GPU", count > 0, f"{count}, {build}" if count else reason, "training runs on the CPU")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        ratio = f"bf16 {_measure_bf16_speed(f'cuda:{index}'):.1f} × as fast as fp32"
        yield Finding(f"GPU {index}", True, f"{properties.name}, {memory}, {ratio}")
    has_fp8 = count > 0 and all(multiplies_fp8(torch.device("cuda", index)) for index in range(count))
    yield Finding("fp8 on it", has_fp8, "for train.precision=fp8", "needs Ada or Hopper; elsewhere use bf16")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding("gloo", gloo, "for processes on CPUs", "install a torch that has it", required=True)
    nccl = dist.is_available() and dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl and count else ""
    yield Finding("NCCL", nccl, version or "for processes on GPUs", "comes with a torch for CUDA")


def check_mpi() -> Iterator[Finding]:
    """Check mpirun, and mpi4py with its MPI library."""
    yield _check_program("mpirun", ["--version"], "make system-deps, or apt-get install openmpi-bin")
    if not _get_version("mpi4py"):
        yield Finding("mpi4py", False, "not installed", "pip install 'megatfm[mpi]'")
        return
    # In another process, since an incompatible library may crash the process that loads it.
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    ok, text = _run([sys.executable, "-c", code])
    library = f"{_get_version('mpi4py')}, {text.split(',')[0]}" if ok else "finds no MPI library that it can load"
    yield Finding("mpi4py", ok, library, "make system-deps, or apt-get install libopenmpi-dev")


def check_slurm() -> Iterator[Finding]:
    """Check SLURM's commands, and whether its controller answers."""
    yield _check_program("sbatch", ["--version"], "run `megatfm launch --slurm` where jobs are submitted")
    if shutil.which("sinfo"):
        ok, text = _run(["sinfo", "--noheader", "--format=%P %D"])
        partitions = ", ".join(f"{line} nodes" for line in text.splitlines()) if ok else text
        yield Finding("partitions", ok, partitions, "is slurmctld running? ask `scontrol ping`")


def check_packages() -> Iterator[Finding]:
    """Check optional packages and programs."""
    for package, (purpose, advice) in OPTIONAL.items():
        version = _get_version(package)
        yield Finding(package, bool(version), f"{version or 'not installed'}, for {purpose}", advice)
    browsers = ("chromium", "chromium-browser", "google-chrome")
    browser = next((name for name in browsers if shutil.which(name)), None)
    yield Finding(
        "chromium", bool(browser), f"{browser or 'not installed'}, for tests of the report", "make system-deps"
    )


def check_disk() -> Iterator[Finding]:
    """Check the free disk space in the working directory."""
    free = shutil.disk_usage(Path.cwd()).free
    free_text = f"{free / 1e9:.1f} GB free in {Path.cwd()}"
    yield Finding("disk", free >= ENOUGH_DISK, free_text, "a checkpoint takes 12 to 16 bytes per parameter")


SECTIONS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": check_python,
    "Devices": check_gpus,
    "MPI": check_mpi,
    "SLURM": check_slurm,
    "Packages": check_packages,
    "Disk": check_disk,
}


def _get_version(package: str) -> str:
    """Return the installed version of a package; empty if it can't be imported."""
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _check_program(name: str, arguments: list[str], advice: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, False, "not on the PATH", advice)
    ok, text = _run([path, *arguments])
    return Finding(name, ok, text.splitlines()[0] if ok and text else text, advice)


def _run(command: list[str]) -> tuple[bool, str]:
    """Run a command; return whether it succeeded in time, and its output, or the last line of its errors."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {ANSWER_SECONDS:g} s"
    except OSError as error:
        return False, f"can't be run: {error.strerror}"
    if result.returncode == 0:
        return True, result.stdout.strip()
    return False, (result.stderr.strip().splitlines() or ["failed"])[-1]


def _measure_bf16_speed(device: str) -> float:
    """Measure how many times faster a matmul is in bfloat16 than in float32."""
    import torch

    from megatfm.tracking.utilization import measure_bf16_speedup

    return measure_bf16_speedup(torch.device(device))
