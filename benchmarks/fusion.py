"""Kernels of a compiled block: those that inductor writes in Triton, forward and backward, by name.

    python benchmarks/fusion.py --out benchmarks/results

Needs Triton and no GPU: inductor takes the CPU's tensors through the code generator that it has for GPUs, and what it
writes is counted, not run. Float32, in which attention on a CPU is one operator of torch, as it is on a GPU; products
of matrices and attention are left out, since they are libraries'.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import common
import torch
from torch import Tensor

from megatfm.config import ModelConfig, load_config
from megatfm.engines.native.compile import compile_all
from megatfm.models import build
from megatfm.parallel.layout import transformer_blocks

ONE_BLOCK = ["model.n_layers=1", "model.vocab_size=128", "model.dropout=0", "model.attention.dropout=0"]
CASES = {
    "GPT-2 (LayerNorm, GELU)": ("gpt2-124m", []),
    "Llama (RMSNorm, SwiGLU, RoPE)": (
        "llama3-8b",
        [
            "model.d_model=512",
            "model.ffn.d_ff=1536",
            "model.attention.n_heads=8",
            "model.attention.n_kv_heads=2",
        ],
    ),
}
"""Name → preset, and what is smaller than in it."""


def load_case(case: str) -> ModelConfig:
    """A model of one block."""
    preset, smaller = CASES[case]
    return load_config(preset, [*smaller, *ONE_BLOCK]).model


class WrittenKernel(NamedTuple):
    """A kernel: its name, and the module in which it is."""

    name: str
    code: str


@contextmanager
def record_kernels() -> Iterator[list[WrittenKernel]]:
    """Within, compiling on a CPU writes Triton, and running notes the kernels and does nothing."""
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
    """A block's kernels in the order in which they run: forward, backward."""
    model = build(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    compile_all(transformer_blocks(model), autotune=False)
    tokens = torch.arange(128).view(2, 64) % (config.vocab_size or 1)
    inputs = {"positions": torch.arange(64).expand(2, -1), "keys": torch.arange(2)}
    with record_kernels() as ran:
        hidden: Tensor = model(tokens, **inputs).hidden
        forward = list(ran)
        hidden.sum().backward()
        return forward, ran[len(forward) :]


def format_report() -> str:
    lines = [
        f"# Kernels of a compiled block, {common.today()}",
        "",
        f"{common.get_cpu_name()}, torch {torch.__version__}, written by inductor for Triton and "
        "not run; `python benchmarks/fusion.py`. Matrix products and attention, which libraries do, are not counted.",
    ]
    for case in CASES:
        for way, written_kernels in zip(("forward", "backward"), list_kernels(load_case(case)), strict=True):
            lines += [
                "",
                f"{case}, {way}: {len(written_kernels)}",
                "",
                *(f"- `{kernel.name}`" for kernel in written_kernels),
            ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Print the lists, and write them where asked to."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-fusion.md")
    args = parser.parse_args(arguments)
    text = format_report()
    print(text)
    common.write_text(common.make_dated_path(args.out, "fusion.md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
