"""On what kind of machine a run computes, as far as bits depend on that: processor, threads, libraries, settings."""

import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatfm.ranks import all_gather, machine

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
"""What /proc/cpuinfo calls a processor, on x86 and on ARM."""
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


def processor() -> dict[str, str]:
    """Model, instruction sets, the ones among these that torch's own kernels use, and threads."""
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
    """The GPU of this process, and the libraries that compute and sum there."""
    if not torch.cuda.is_available():
        return {"gpu": "none"}
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "CUDA": torch.version.cuda or f"ROCm {torch.version.hip}",
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    if dist.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def started(launcher: str) -> dict[str, str]:
    """How many processes a run has on how many machines, and what started them. A collective."""
    machines = all_gather(machine())
    return {"processes": str(len(machines)), "machines": str(len(set(machines))), "launcher": launcher}


def libraries() -> dict[str, str]:
    """torch, what it was built with, and what the environment tells them."""
    built = torch.__config__.show()
    found = {name: re.search(pattern, built) for name, pattern in LIBRARIES.items()}
    said = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return {
        "torch": str(torch.__version__),  # with its build, as in 2.13.0+cpu
        **{name: match[1] for name, match in found.items() if match},
        "settings": " ".join(said) or "none",
    }


def gather_hardware(device: torch.device) -> dict[str, list[Any]]:
    """The kind of machine of every rank. A collective."""
    mine = {**libraries(), **(gpu() if device.type == "cuda" else processor())}
    ranks = all_gather(mine)
    kinds = [facts for number, facts in enumerate(ranks) if facts not in ranks[:number]]
    return {"kinds": kinds, "of_rank": [kinds.index(facts) for facts in ranks]}


def diff_hardware(before: HardwareByRank, now: HardwareByRank) -> list[str]:
    """What is other than it was, of the ranks that there were before and are now, as `threads: 1 → 2`."""
    pairs = list(zip(_by_rank(before), _by_rank(now), strict=False))
    found: dict[str, list[int]] = defaultdict(list)
    for rank, (was, here) in enumerate(pairs):
        for key in dict.fromkeys([*was, *here]):
            if was.get(key) != here.get(key):
                found[_change(key, was.get(key, "none"), here.get(key, "none"))].append(rank)
    return [
        line if len(ranks) == len(pairs) else f"{line} (on rank {', '.join(map(str, ranks))})"
        for line, ranks in found.items()
    ]


def _by_rank(machines: HardwareByRank) -> list[Mapping[str, str]]:
    return [machines["kinds"][number] for number in machines["of_rank"]]


def _change(key: str, was: str, here: str) -> str:
    if key != "instruction sets":
        return f"{key}: {was} → {here}"
    before, after = set(was.split()), set(here.split())
    less = [f"without {' '.join(sorted(before - after))}"] if before - after else []
    more = [f"with {' '.join(sorted(after - before))}"] if after - before else []
    return f"{key}: {', '.join(less + more)}"
