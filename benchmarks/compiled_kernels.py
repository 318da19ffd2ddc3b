"""Triton kernels, compiled for a GPU without one: which inductor writes for a block, and what ours and those need.

    python benchmarks/compiled_kernels.py resources --out benchmarks/results/DATE-kernels.md
    python benchmarks/compiled_kernels.py fusion --out benchmarks/results
    python benchmarks/compiled_kernels.py blocks --out benchmarks/results

resources: registers, spills, shared memory and bytes that move of our kernels, for sm_90 (H100, H200) by Triton's own
ptxas. Predicted times are bytes over the 4.3 TB/s that an H200 copies.
fusion: kernels of a compiled block, forward and backward, by name. Inductor takes the CPU's tensors through the code
generator that it has for GPUs, and what it writes is counted, not run. Float32, in which attention on a CPU is one
operator of torch, as it is on a GPU; products of matrices and attention are left out, since they are libraries'.
blocks: registers and spills of such kernels on sm_90. Presets as they are, their dropout included, but with few heads
of their own width, in bfloat16 and float32. Blocks of threads are of one plain choice: on a GPU inductor tries
several.
"""

import argparse
import importlib.util
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import common
import torch
import triton
from torch import Tensor
from torch._inductor.runtime import triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatfm.config import ModelConfig, load_config
from megatfm.engines.native.compile import compile_all
from megatfm.models import build
from megatfm.ops import cross_entropy_triton
from megatfm.optim import adamw_triton
from megatfm.parallel.layout import iter_blocks

# ------------------------------------------------------------------------------------------------ resources

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


PASSES = {
    "cross-entropy": ("gradient_kernel", False, 3),
    "statistics of a vocabulary shard": ("statistics_kernel", True, 1),
    "gradient of a vocabulary shard": ("gradient_kernel", True, 2),
}
"""Title → kernel of the cross-entropy, whether it runs on a shard, and how often it reads or writes the logits."""
ADAMW_BYTES = 20
"""Bytes moved for each weight: weight (float32) and both moments (bfloat16) are read and written, its gradient read."""


def compile_cross_entropy(
    element: str, *, name: str = "gradient_kernel", sharded: bool = False, capped: bool = False, smoothed: bool = False
) -> KernelResources:
    """Compile a kernel of the cross-entropy for logits of type `element` (Triton's name)."""
    kernel = getattr(cross_entropy_triton, name)
    floats = {"softcap", "smoothing", "spread"}
    pointers = {"logits_MW": f"*{element}", "targets_M": "*i64"}
    pointers |= dict.fromkeys(("losses_M", "statistics_SM", "max_logits_M", "sums_M"), "*fp32")
    fixed: dict[str, int | None] = {"IGNORE": -100, "CAPPED": capped, "SMOOTHED": smoothed, "SHARDED": sharded}
    fixed |= {
        "BLOCK": cross_entropy_triton.BLOCK,
        **dict.fromkeys(["losses_M"] if sharded else ["max_logits_M", "sums_M"]),
    }
    fixed = {key: value for key, value in fixed.items() if key in kernel.arg_names}
    signature = {key: pointers.get(key, "fp32" if key in floats else "i32") for key in kernel.arg_names}
    return compile_kernel(kernel, signature | dict.fromkeys(fixed, "constexpr"), fixed, cross_entropy_triton.WARPS)


def compile_adamw(*, is_run: bool = True) -> KernelResources:
    """Compile the kernel of AdamW with moments in bfloat16, as it runs where the device may skip a step.

    is_run: a rank's block of a weight is a run of its elements, as ZeRO shards it.
    """
    types = {"*fp32": ("weights", "gradients", "found_inf"), "*bf16": ("means", "squares"), "i64": ("steps",)}
    types["i32"] = ("numel", "first_index", "size_1", "size_2", "stride_0", "stride_1")
    types["fp32"] = ("decay_factor", "step_size", "beta1", "beta2", "root_correction", "eps")
    type_of = {name: kind for kind, names in types.items() for name in names}
    fixed = {"CAN_SKIP": True, "IS_RUN": is_run, "IS_LARGE": False, "BLOCK": adamw_triton.BLOCK}
    names = adamw_triton.adamw_kernel.arg_names
    signature = {name: "constexpr" if name in fixed else type_of[name] for name in names}
    return compile_kernel(adamw_triton.adamw_kernel, signature, fixed, adamw_triton.WARPS)


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
    registers, spills = re.search(r"Used (\d+) registers", messages), re.findall(r"(\d+) bytes spill", messages)
    assert registers, messages
    return KernelResources(int(registers[1]), sum(map(int, spills)), binary.metadata.shared)


@common.argument("--out", type=common.make_output_file)
def run_resources(args: argparse.Namespace) -> None:
    page = common.Page(
        args.out,
        "Kernels compiled for sm_90",
        f"Triton {triton.__version__}, without a GPU: compiled, not run there. `python benchmarks/compiled_kernels.py "
        f"resources`. Bytes are those of {TOKENS:,} tokens over a vocabulary of {VOCABULARY:,} (GPT-2, 16 rows of "
        f"1,024), times at {COPIED / 1e12} TB/s.",
        table="| Kernel | Registers a thread | Spilled bytes | Shared memory | Bytes moved | Predicted |",
    )
    for element, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        variants: tuple[tuple[str, dict[str, Any]], ...] = (
            ("", {}),
            (", soft cap, smoothed", {"capped": True, "smoothed": True}),
        )
        for (title, (name, sharded, passes)), (how, options) in itertools.product(PASSES.items(), variants):
            use = compile_cross_entropy(element, name=name, sharded=sharded, **options)
            moved = passes * TOKENS * VOCABULARY * size
            page.add(
                f"| {title}, {element}{how} | {use.registers} | {use.spilled} | {use.shared} B | "
                f"{moved / 1e9:.2f} GB | {1e3 * moved / COPIED:.2f} ms |"
            )
    use, moved = compile_adamw(), ADAMW_BYTES * 10**9
    page.add(
        f"| AdamW with moments in bf16, of 10⁹ weights | {use.registers} | {use.spilled} | {use.shared} B | "
        f"{moved / 1e9:.2f} GB | {1e3 * moved / COPIED:.2f} ms |"
    )


# --------------------------------------------------------------------------------------------------- fusion

ONE_BLOCK_WITHOUT_DROPOUT = ["model.n_layers=1", "model.vocab_size=128", "model.dropout=0", "model.attention.dropout=0"]
CASES = {
    "GPT-2 (LayerNorm, GELU)": ("gpt2-124m", []),
    "Llama (RMSNorm, SwiGLU, RoPE)": (
        "llama3-8b",
        ["model.d_model=512", "model.ffn.d_ff=1536", "model.attention.n_heads=8", "model.attention.n_kv_heads=2"],
    ),
}
"""Name → preset, and what is smaller than in it."""


def load_case(case: str) -> ModelConfig:
    preset, smaller = CASES[case]
    return load_config(preset, [*smaller, *ONE_BLOCK_WITHOUT_DROPOUT]).model


class WrittenKernel(NamedTuple):
    """A kernel: its name, and the module in which it is."""

    name: str
    code: str


@contextmanager
def record_kernels() -> Iterator[list[WrittenKernel]]:
    """Context manager in which a CPU compiles to Triton, and running a kernel only records it."""
    from torch._functorch import config as functorch
    from torch._inductor import async_compile, config

    ran: list[WrittenKernel] = []

    class Kernel:
        def __init__(self, kernel: WrittenKernel) -> None:
            self.kernel = kernel

        def run(self, *_: Any, **__: Any) -> None:
            ran.append(self.kernel)

    def triton(_: object, name: str, code: str, *__: Any, **___: Any) -> Kernel:
        return Kernel(WrittenKernel(name, code))

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(config.patch(cpu_backend="triton", fx_graph_cache=False))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.enter_context(patch.object(async_compile.AsyncCompile, "triton", triton))
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", lambda: "no GPU"))
        yield ran
    torch._dynamo.reset()


def list_kernels(
    config: ModelConfig, dtype: torch.dtype = torch.float32
) -> tuple[list[WrittenKernel], list[WrittenKernel]]:
    """Return a block's kernels in the order in which they run: forward, backward."""
    model = build(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    compile_all(iter_blocks(model), autotune=False)
    tokens = torch.arange(128).view(2, 64) % (config.vocab_size or 1)
    inputs = {"positions": torch.arange(64).expand(2, -1), "keys": torch.arange(2)}
    with record_kernels() as ran:
        hidden: Tensor = model(tokens, **inputs).hidden
        forward = list(ran)
        hidden.sum().backward()
        return forward, ran[len(forward) :]


@common.argument("--out", type=common.make_output_folder, help="folder for DATE-fusion.md")
def run_fusion(args: argparse.Namespace) -> None:
    page = common.Page(
        common.make_dated_path(args.out, "fusion.md"),
        "Kernels of a compiled block",
        f"{common.get_cpu_name()}, torch {torch.__version__}, written by inductor for Triton and not run; `python "
        "benchmarks/compiled_kernels.py fusion`. Matrix products and attention, which libraries do, are not counted.",
    )
    for case in CASES:
        for way, kernels in zip(("forward", "backward"), list_kernels(load_case(case)), strict=True):
            page.add("", f"{case}, {way}: {len(kernels)}", "", *(f"- `{kernel.name}`" for kernel in kernels))


# --------------------------------------------------------------------------------------------------- blocks

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
    return load_config(preset, [*ONE_BLOCK, *PRESETS[preset]]).model


def load_module(written: WrittenKernel, folder: Path) -> ModuleType:
    """Load the module with a kernel, whose decorator gives it back with what inductor says of it."""
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
    """Return the resources of a kernel on sm_90. Raises what Triton raises where it doesn't compile."""
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
    kernels = list_kernels(load_preset(preset), DTYPES[dtype])
    for way, written_kernels in zip(("forward", "backward"), kernels, strict=True):
        for written in dict.fromkeys(written_kernels):
            yield way, written, compile_ahead(written)


@common.argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
@common.argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-block-kernels.md")
def run_blocks(args: argparse.Namespace) -> None:
    page = common.Page(
        common.make_dated_path(args.out, "block-kernels.md"),
        "Kernels of compiled blocks on sm_90",
        f"torch {torch.__version__}, Triton {triton.__version__}, without a GPU: compiled, not run. `python "
        "benchmarks/compiled_kernels.py blocks`, whose head says how.",
        table="| Preset | | Kernels | Registers a thread, at most | Spilled bytes |",
    )
    for preset in args.presets:
        for dtype in args.dtypes:
            kernels_used = list(compile_preset(preset, dtype))
            for way in ("forward", "backward"):
                uses = [use for at, _, use in kernels_used if at == way]
                registers, spilled = max(use.registers for use in uses), sum(use.spilled for use in uses)
                page.add(f"| `{preset}`, {dtype} | {way} | {len(uses)} | {registers} | {spilled} |")


PARTS = {"resources": run_resources, "fusion": run_fusion, "blocks": run_blocks}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
