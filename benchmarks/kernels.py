"""What compiling our Triton kernels for a GPU tells without one: registers, spills, shared memory, bytes that move.

    python benchmarks/kernels.py --out benchmarks/results/DATE-kernels.md

For sm_90 (H100, H200), by Triton's own ptxas. Predicted times are bytes over the 4.3 TB/s that an H200 copies.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import destination
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatfm.ops import softmax_kernel

TARGET = GPUTarget("cuda", 90, 32)
COPIED = 4.3e12
"""Bytes a second, read and written, of a large copy on one H200."""
TOKENS, VOCABULARY = 16 * 1024, 50257


@dataclass(frozen=True)
class Compiled:
    """Of one kernel: registers a thread, bytes that it spills, bytes of shared memory a program."""

    registers: int
    spilled: int
    shared: int


def softmax(element: str, *, capped: bool = False, smoothed: bool = False) -> Compiled:
    """The gradient of the cross-entropy, of logits in `element` (Triton's name of a type)."""
    pointers = {"logits_MV": f"*{element}", "targets_M": "*i64", "losses_M": "*fp32"}
    numbers = {"stride": "i32", "vocabulary": "i32", "softcap": "fp32", "smoothing": "fp32"}
    fixed = {"IGNORE": -100, "CAPPED": capped, "SMOOTHED": smoothed, "BLOCK": softmax_kernel.BLOCK}
    signature = {**pointers, **numbers, **dict.fromkeys(fixed, "constexpr")}
    return compiled(softmax_kernel.kernel, signature, fixed, softmax_kernel.WARPS)


def compiled(kernel: Any, signature: dict[str, str], fixed: dict[str, Any], warps: int) -> Compiled:
    """For sm_90, and what ptxas says of it."""
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps})
    ptxas = get_ptxas(TARGET.arch).path
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"], encoding="utf-8")
        command = [ptxas, "-v", "--gpu-name=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", told), re.findall(r"(\d+) bytes spill", told)
    assert registers, told
    return Compiled(int(registers[1]), sum(map(int, spills)), made.metadata.shared)


def main() -> None:
    """Compile all, print a table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=destination.file)
    args = parser.parse_args()
    moved = 3 * TOKENS * VOCABULARY
    lines = [
        f"# Kernels compiled for sm_90, {date.today().isoformat()}",
        "",
        f"Triton {triton.__version__}, without a GPU: compiled, not run there. `python benchmarks/kernels.py`. Bytes "
        f"are those of {TOKENS:,} tokens over a vocabulary of {VOCABULARY:,} (GPT-2, 16 rows of 1,024), times at "
        f"{COPIED / 1e12} TB/s.",
        "",
        "| Kernel | Registers a thread | Spilled bytes | Shared memory | Bytes moved | Predicted |",
        "|---|---|---|---|---|---|",
    ]
    for element, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for how, options in (("", {}), (", soft cap, smoothed", {"capped": True, "smoothed": True})):
            found, total = softmax(element, **options), moved * size
            lines.append(
                f"| cross-entropy, {element}{how} | {found.registers} | {found.spilled} | {found.shared} B | "
                f"{total / 1e9:.2f} GB | {1e3 * total / COPIED:.2f} ms |"
            )
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
