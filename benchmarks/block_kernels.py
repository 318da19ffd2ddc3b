"""Kernels that inductor writes in Triton for compiled blocks, compiled for a GPU that is not there: do they compile, do
they spill?

    python benchmarks/block_kernels.py --out benchmarks/results

Presets as they are, their dropout included, but with few heads of their own width; forward and backward, in bfloat16
and float32 (see `fusion.py`), for sm_90 (H100, H200) by Triton's own ptxas. Blocks of threads are of one plain choice:
on a GPU inductor tries several. Matrix multiplications and attention are calls of libraries, and not included.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import common
import torch
import triton
from fusion import WrittenKernel, list_kernels
from kernels import KernelResources, compile_kernel
from torch._inductor.runtime import triton_heuristics

from megatfm.config import ModelConfig, load_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARPS = 4
BLOCKS = {"XBLOCK": 256, "YBLOCK": 1, "ZBLOCK": 1}
REDUCTION_BLOCKS = {"XBLOCK": 1, "YBLOCK": 1, "R0_BLOCK": 1024, "R1_BLOCK": 1}
DECORATORS = ("pointwise", "reduction", "persistent_reduction")
ONE_BLOCK = ["model.n_layers=1", "model.vocab_size=128"]
PRESETS: dict[str, list[str]] = {
    "gpt2-124m": ["model.d_model=320", "model.attention.n_heads=5"],
    "bert-base": ["model.d_model=320", "model.attention.n_heads=5"],
    "llama3-8b": [
        "model.d_model=640",
        "model.ffn.d_ff=1536",
        "model.attention.n_heads=5",
        "model.attention.n_kv_heads=1",
    ],
}
"""Preset → what is smaller than in it. A width that is no power of two, and whose quarter fills no vectors."""


def load_preset(preset: str) -> ModelConfig:
    """Return the config of a preset with one block."""
    return load_config(preset, [*ONE_BLOCK, *PRESETS[preset]]).model


def load_module(written: WrittenKernel, folder: Path) -> ModuleType:
    """The module with a kernel, whose decorator gives it back with what inductor says of it."""
    path = folder / f"{written.name}.py"
    path.write_text(written.code.replace("triton_helpers.set_driver_to_cpu()", ""), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(written.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def decorator(**hints: Any) -> Callable[[Any], tuple[Any, dict[str, Any]]]:
        return lambda kernel: (kernel, hints)

    with ExitStack() as stack:
        for name in DECORATORS:
            stack.enter_context(patch.object(triton_heuristics, name, decorator))
        spec.loader.exec_module(module)
    return module


def compile_ahead(written: WrittenKernel) -> KernelResources:
    """Resources of a kernel on sm_90. Raises what Triton raises where it doesn't compile."""
    with tempfile.TemporaryDirectory() as folder:
        module = load_module(written, Path(folder))
        kernel, hints = next(value for value in vars(module).values() if isinstance(value, tuple))
        meta = hints["triton_meta"]
        blocks = REDUCTION_BLOCKS if "r0_" in hints["size_hints"] else BLOCKS
        signature: dict[str, str] = meta["signature"]
        fixed = {name: blocks[name] for name, kind in signature.items() if kind == "constexpr"}
        return compile_kernel(kernel, signature, fixed | meta["constants"], WARPS)


def compile_preset(preset: str, dtype: str) -> Iterator[tuple[str, WrittenKernel, KernelResources]]:
    """Yield "forward" or "backward", each kernel once, and its resources."""
    for way, written_kernels in zip(
        ("forward", "backward"), list_kernels(load_preset(preset), DTYPES[dtype]), strict=True
    ):
        for written in dict.fromkeys(written_kernels):
            yield way, written, compile_ahead(written)


def main(arguments: list[str] | None = None) -> int:
    """Print a table, and write it where asked to."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-block-kernels.md")
    args = parser.parse_args(arguments)
    page = common.Page(
        common.make_dated_path(args.out, "block-kernels.md"),
        f"# Kernels of compiled blocks on sm_90, {common.today()}",
        "",
        f"torch {torch.__version__}, Triton {triton.__version__}, without a GPU: compiled, not run. `python "
        "benchmarks/block_kernels.py`, whose head says how.",
        "",
        "| Preset | | Kernels | Registers a thread, at most | Spilled bytes |",
        "|---|---|---|---|---|",
    )
    for preset in args.presets:
        for dtype in args.dtypes:
            kernels_used = list(compile_preset(preset, dtype))
            for way in ("forward", "backward"):
                uses = [use for at, _, use in kernels_used if at == way]
                registers, spilled = max(use.registers for use in uses), sum(use.spilled for use in uses)
                page.add(f"| `{preset}`, {dtype} | {way} | {len(uses)} | {registers} | {spilled} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
