"""The hardware and software of a run, as far as they may change results bit by bit."""

import json
import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatfm.object_collectives import all_gather_object, get_machine_name
from megatfm.version import __version__

CPUINFO = Path("/proc/cpuinfo")
CPU_MODEL_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part", "CPU variant",
)  # fmt: skip
"""Fields of /proc/cpuinfo that identify the processor, on x86 and on ARM."""
ISA_PREFIXES = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm")
"""Prefixes of the instruction sets by which libraries choose their kernels."""
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_DYNAMIC", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
"""Environment variables that change which kernel, or which order of summation, a library chooses."""
LIBRARIES = {"MKL": r"Math Kernel Library Version (\S+?)-", "oneDNN": r"MKL-DNN v?(\S+)", "BLAS": r"BLAS_INFO=(\w+)"}
"""Library → pattern of its version in torch.__config__.show()."""

HardwareByRank = Mapping[str, Sequence[Any]]
"""`kinds`: list of distinct hardware descriptions; `of_rank`: for each rank, the index of its description in it."""


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return versions and hardware of this process. GPUs are described only if `device` is one."""
    packages = ("numpy", "safetensors", "sentencepiece", "tokenizers")
    return {
        "megatfm": __version__,
        **describe_commit(Path(__file__).parents[2]),
        "python": platform.python_version(),
        **list_libraries(),
        **{package: metadata.version(package) for package in packages},
        "system": platform.platform(),
        "cpu cores": str(os.cpu_count()),
        **describe_processor(),
        **(describe_gpu() if device.type == "cuda" else {"gpu": "none"}),
    }


def describe_commit(root: Path) -> dict[str, str]:
    """Return the git commit of the code, and whether it has uncommitted changes; empty outside a checkout.

    A job's copy of the code has this information in its `origin.json`.
    """
    origin = root / "origin.json"
    head, changed = "", False
    try:
        if (root / ".git").exists():
            head, status = (_run_git(root, "rev-parse", "HEAD"), _run_git(root, "status", "--porcelain", "-uno"))
            changed = bool(status)
        elif origin.is_file():
            record = json.loads(origin.read_text(encoding="utf-8"))
            head, changed = str(record.get("commit", "")), bool(record.get("changed"))
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError):  # a damaged file, or no git
        return {}
    return {"commit": head + " with changes" * changed} if head else {}


def _run_git(root: Path, *argv: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *argv], capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.strip()


def describe_processor() -> dict[str, str]:
    """Return the processor's model and instruction sets, the one for which torch chose its kernels, and threads."""
    facts: dict[str, str] = {}
    try:
        for line in CPUINFO.read_text().partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    except OSError:  # not on Linux
        facts = {"model name": platform.processor()}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return {
        "cpu": ", ".join(facts[key] for key in CPU_MODEL_FIELDS if facts.get(key)) or platform.machine(),
        "instruction sets": " ".join(sorted(flag for flag in flags if flag.startswith(ISA_PREFIXES))),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def describe_gpu() -> dict[str, str]:
    """Return the GPU of this process, and the versions of its libraries."""
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "CUDA": torch.version.cuda or f"ROCm {torch.version.hip}",
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    if dist.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def describe_launch(launcher: str) -> dict[str, str]:
    """Return the numbers of processes and machines of a run, and the launcher. A collective."""
    machines = all_gather_object(get_machine_name())
    return {"processes": str(len(machines)), "machines": str(len(set(machines))), "launcher": launcher}


def list_libraries() -> dict[str, str]:
    """Return the versions of torch and its libraries, and the environment variables that configure them."""
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
    facts = {**list_libraries(), **(describe_gpu() if device.type == "cuda" else describe_processor())}
    ranks = all_gather_object(facts)
    kinds = [facts for rank, facts in enumerate(ranks) if facts not in ranks[:rank]]
    return {"kinds": kinds, "of_rank": [kinds.index(facts) for facts in ranks]}


def diff_hardware(saved: HardwareByRank, current: HardwareByRank) -> list[str]:
    """Return the changes on ranks that exist in both, as `threads: 1 → 2`."""
    if not _is_hardware_record(saved):
        return ["the checkpoint's record of them is damaged"]
    pairs = list(zip(_expand_by_rank(saved), _expand_by_rank(current), strict=False))
    ranks_by_change: dict[str, list[int]] = defaultdict(list)
    for rank, (old, new) in enumerate(pairs):
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                change = _describe_change(key, old.get(key, "none"), new.get(key, "none"))
                ranks_by_change[change].append(rank)
    return [
        line if len(ranks) == len(pairs) else f"{line} (on rank {', '.join(map(str, ranks))})"
        for line, ranks in ranks_by_change.items()
    ]


def _is_hardware_record(record: object) -> bool:
    """Return whether a value that was read from a file is a HardwareByRank."""
    if not isinstance(record, Mapping):
        return False
    kinds, of_rank = record.get("kinds"), record.get("of_rank")
    if not isinstance(kinds, list) or not isinstance(of_rank, list):
        return False
    are_texts = all(
        isinstance(kind, Mapping) and all(isinstance(fact, str) for fact in kind.values()) for kind in kinds
    )
    return are_texts and all(type(index) is int and 0 <= index < len(kinds) for index in of_rank)


def _expand_by_rank(machines: HardwareByRank) -> list[Mapping[str, str]]:
    return [machines["kinds"][index] for index in machines["of_rank"]]


def _describe_change(key: str, old: str, new: str) -> str:
    if key != "instruction sets":
        return f"{key}: {old} → {new}"
    before, after = set(old.split()), set(new.split())
    removed = [f"without {' '.join(sorted(before - after))}"] if before - after else []
    added = [f"with {' '.join(sorted(after - before))}"] if after - before else []
    return f"{key}: {', '.join(removed + added)}"
