"""Resources of our Triton kernels, compiled for a GPU without one: registers, spills, shared memory, bytes that move.

    python benchmarks/kernels.py --out benchmarks/results/DATE-kernels.md

For sm_90 (H100, H200), by Triton's own ptxas. Predicted times are bytes over the 4.3 TB/s that an H200 copies.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatfm.ops import cross_entropy_triton

TARGET = GPUTarget("cuda", 90, 32)
COPIED = 4.3e12
"""Bytes a second, read and written, of a large copy on one H200."""
TOKENS, VOCABULARY = 16 * 1024, 50257


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel: registers a thread, bytes that it spills, bytes of shared memory a program."""

    registers: int
    spilled: int
    shared: int


def compile_cross_entropy(element: str, *, capped: bool = False, smoothed: bool = False) -> KernelResources:
    """Compile the cross-entropy for logits of type `element` (Triton's name)."""
    pointers = {"logits_MV": f"*{element}", "targets_M": "*i64", "losses_M": "*fp32"}
    numbers = {"stride": "i32", "vocabulary": "i32", "softcap": "fp32", "smoothing": "fp32"}
    fixed = {"IGNORE": -100, "CAPPED": capped, "SMOOTHED": smoothed, "BLOCK": cross_entropy_triton.BLOCK}
    signature = {**pointers, **numbers, **dict.fromkeys(fixed, "constexpr")}
    return compile_kernel(cross_entropy_triton.kernel, signature, fixed, cross_entropy_triton.WARPS)


def compile_kernel(kernel: Any, signature: dict[str, str], fixed: dict[str, Any], warps: int) -> KernelResources:
    """Compile for sm_90; return the resources that ptxas reports."""
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    binary = triton.compile(source, target=TARGET, options={"num_warps": warps})
    ptxas = get_ptxas(TARGET.arch).path
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(binary.asm["ptx"], encoding="utf-8")
        command = [ptxas, "-v", "--gpu-name=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        messages = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (
        re.search(r"Used (\d+) registers", messages),
        re.findall(r"(\d+) bytes spill", messages),
    )
    assert registers, messages
    return KernelResources(int(registers[1]), sum(map(int, spills)), binary.metadata.shared)


def main() -> None:
    """Compile all, print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--out", type=common.make_output_file)
    args = parser.parse_args()
    moved = 3 * TOKENS * VOCABULARY
    lines = [
        f"# Kernels compiled for sm_90, {common.today()}",
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
            use, total = compile_cross_entropy(element, **options), moved * size
            lines.append(
                f"| cross-entropy, {element}{how} | {use.registers} | {use.spilled} | {use.shared} B | "
                f"{total / 1e9:.2f} GB | {1e3 * total / COPIED:.2f} ms |"
            )
    print("\n".join(lines))
    common.write_text(args.out, "\n".join(lines))


if __name__ == "__main__":
    main()
