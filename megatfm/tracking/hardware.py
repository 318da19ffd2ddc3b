"""The hardware and software that a run computes on, as far as bits depend on them; and how much of it a run uses, as
model FLOPs utilization (MFU).

MFU (Chowdhery et al. 2022, appendix B): the FLOPs that the model needs for its tokens, over those that the devices
could have done in the time. Nothing that is recomputed counts."""

import json
import os
import platform
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatfm.config import Config
from megatfm.object_collectives import all_gather, machine
from megatfm.version import __version__

CPUINFO = Path("/proc/cpuinfo")
CPU_MODEL_FIELDS = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "CPU implementer",
    "CPU part",
    "CPU variant",
)
"""Fields of /proc/cpuinfo that tell the processor, on x86 and on ARM."""
ISA_PREFIXES = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm")
"""Beginnings of the names of those instruction sets by which libraries choose their kernels."""
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_DYNAMIC", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
"""Variables of the environment that change which kernel, or which order of a sum, a library takes."""
LIBRARIES = {
    "MKL": r"Math Kernel Library Version (\S+?)-",
    "oneDNN": r"MKL-DNN v?(\S+)",
    "BLAS": r"BLAS_INFO=(\w+)",
}
"""Library → where torch's account of how it was built has it."""

HardwareByRank = Mapping[str, Sequence[Any]]
"""kinds: facts, each kind once; of_rank: the number of each rank's kind."""


def environment(device: torch.device) -> dict[str, str]:
    """Return versions and hardware of this process, which computes on `device`; of a GPU only where it is that."""
    packages = ("numpy", "safetensors", "sentencepiece", "tokenizers")
    return {
        "megatfm": __version__,
        **commit(Path(__file__).parents[2]),
        "python": platform.python_version(),
        **libraries(),
        **{package: metadata.version(package) for package in packages},
        "system": platform.platform(),
        "cpu cores": str(os.cpu_count()),
        **processor(),
        **(gpu() if device.type == "cuda" else {"gpu": "none"}),
    }


def commit(root: Path) -> dict[str, str]:
    """Return the git commit of the code, and whether files of it were changed; nothing where it is no checkout.

    A job's copy of the code brings a note of where it came from (`origin.json`).
    """
    origin = root / "origin.json"
    head, changed = "", False
    try:
        if (root / ".git").exists():
            head, changed = (
                _git(root, "rev-parse", "HEAD"),
                bool(_git(root, "status", "--porcelain", "-uno")),
            )
        elif origin.is_file():
            note = json.loads(origin.read_text(encoding="utf-8"))
            head, changed = str(note.get("commit", "")), bool(note.get("changed"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {"commit": head + " with changes" * changed} if head else {}


def _git(root: Path, *words: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
    )
    return result.stdout.strip()


def processor() -> dict[str, str]:
    """Return model, instruction sets, those of them that torch's kernels use, and threads."""
    facts: dict[str, str] = {}
    try:
        for line in CPUINFO.read_text().partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    except OSError:  # no Linux
        facts = {"model name": platform.processor()}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return {
        "cpu": ", ".join(facts[key] for key in CPU_MODEL_FIELDS if facts.get(key)) or platform.machine(),
        "instruction sets": " ".join(sorted(flag for flag in flags if flag.startswith(ISA_PREFIXES))),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def gpu() -> dict[str, str]:
    """Return the GPU of this process, and the libraries that compute and sum there."""
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "CUDA": torch.version.cuda or f"ROCm {torch.version.hip}",
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    if dist.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def started(launcher: str) -> dict[str, str]:
    """Return how many processes a run has on how many machines, and what started them. A collective."""
    machines = all_gather(machine())
    return {"processes": str(len(machines)), "machines": str(len(set(machines))), "launcher": launcher}


def libraries() -> dict[str, str]:
    """Return versions of torch and its libraries, and the environment's settings for them."""
    build_config = torch.__config__.show()
    matches = {name: re.search(pattern, build_config) for name, pattern in LIBRARIES.items()}
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return {
        "torch": str(torch.__version__),  # with its build, as in 2.13.0+cpu
        **{name: match[1] for name, match in matches.items() if match},
        "settings": " ".join(settings) or "none",
    }


def gather_hardware(device: torch.device) -> dict[str, list[Any]]:
    """Gather the hardware of every rank. A collective."""
    facts = {**libraries(), **(gpu() if device.type == "cuda" else processor())}
    ranks = all_gather(facts)
    kinds = [facts for number, facts in enumerate(ranks) if facts not in ranks[:number]]
    return {"kinds": kinds, "of_rank": [kinds.index(facts) for facts in ranks]}


def diff_hardware(saved: HardwareByRank, current: HardwareByRank) -> list[str]:
    """List what changed on the ranks that there were before and are now, as `threads: 1 → 2`."""
    pairs = list(zip(_by_rank(saved), _by_rank(current), strict=False))
    ranks_by_change: dict[str, list[int]] = defaultdict(list)
    for rank, (was, now_is) in enumerate(pairs):
        for key in dict.fromkeys([*was, *now_is]):
            if was.get(key) != now_is.get(key):
                ranks_by_change[_change(key, was.get(key, "none"), now_is.get(key, "none"))].append(rank)
    return [
        line if len(ranks) == len(pairs) else f"{line} (on rank {', '.join(map(str, ranks))})"
        for line, ranks in ranks_by_change.items()
    ]


def _by_rank(machines: HardwareByRank) -> list[Mapping[str, str]]:
    return [machines["kinds"][number] for number in machines["of_rank"]]


def _change(key: str, was: str, current: str) -> str:
    if key != "instruction sets":
        return f"{key}: {was} → {current}"
    before, after = set(was.split()), set(current.split())
    less = [f"without {' '.join(sorted(before - after))}"] if before - after else []
    more = [f"with {' '.join(sorted(after - before))}"] if after - before else []
    return f"{key}: {', '.join(less + more)}"


# -------------------------------------------------------------------------------------------- utilization

FlopsPerToken = Callable[[Config], tuple[float, float]]
"""FLOPs of a token in training: with all of the attention matrix, and without the half that a causal model masks."""

PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12 / 2,
    "MI250": 362e12 / 2,
    "V100 PCIE": 112e12,
    "V100": 125e12,
}
"""Dense FLOP/s in 16 bits of GPUs by words of their names, from their makers' data sheets; of V100, float16 alone.
torch sees the two dies of an MI250 or MI250X as two devices."""
OTHER_CHIPS = {"MIG", "GRID", "Laptop", "D", "Ti"}
"""Words in the name of a slice of a GPU, or of one with fewer or more cores than its namesake: these are measured."""
MATMUL_SIZE, MATMUL_SECONDS = 1024, 0.1
"""Size of the matrices whose product is timed where no data sheet is known, and how long at least."""


@dataclass(frozen=True)
class Peak:
    """FLOP/s that a device could do, and where the figure is from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.3g} TFLOP/s a device ({self.source})"


@dataclass(frozen=True)
class Utilization:
    """full, causal_flops_per_token: FLOPs per token. peak: of one device."""

    flops_per_token: float
    causal_flops_per_token: float
    peak: Peak
    devices: int

    def mfu(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu` and, without the masked half of attention, `mfu_causal`, each at a speed."""
        utilisation = tokens_per_second / (self.peak.flops * self.devices)
        return {
            "mfu": utilisation * self.flops_per_token,
            "mfu_causal": utilisation * self.causal_flops_per_token,
        }


def get_peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of this process's device in a precision: the data sheet's where one is known, else measured."""
    bits = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        data_sheet_flops = from_data_sheet(name, dtype)
        return (
            Peak(data_sheet_flops, f"{name}, {bits}: data sheet")
            if data_sheet_flops
            else measure_peak_flops(device, dtype, f"{name}, {bits}")
        )
    return measure_peak_flops(device, dtype, f"CPU, {bits}, {torch.get_num_threads()} threads")


def from_data_sheet(name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's dense FLOP/s in 16 bits; None for other precisions, and GPUs that are not in the table."""
    if dtype not in (torch.bfloat16, torch.float16) or ("V100" in name and dtype == torch.bfloat16):
        return None
    words = name.replace("-", " ").split()
    if OTHER_CHIPS.intersection(words):
        return None
    for device_name, flops in PEAK_FLOPS.items():
        if all(word in words for word in device_name.split()):
            return flops
    return None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, device_name: str) -> Peak:
    """Return the rate of the fastest of several products of square matrices; on a CPU by its threads' own time, so that
    other processes don't lower the peak."""
    a, b = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device) for _ in range(2))

    def clock() -> float:
        return time.perf_counter() if device.type == "cuda" else time.process_time() / torch.get_num_threads()

    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < MATMUL_SECONDS:
        start = clock()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return Peak(
        2 * MATMUL_SIZE**3 / best, f"{device_name}: measured, products of {MATMUL_SIZE} × {MATMUL_SIZE}"
    )


def time_matmul(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a matrix product of a small model's size, the best of several."""
    left, right = (torch.ones(1024, 512, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        (left @ right.T).sum().item()
        best = min(best, time.perf_counter() - start)
    return best
