"""Speed of one GPU at the shapes that training uses: copies, matrix products, attention by kernel.

    python benchmarks/gpu_facts.py --out benchmarks/results

Attention runs forward and backward, bfloat16, each kernel by name, on one document a row and on packed rows; outputs
and gradients are searched for numbers that are not finite and compared with float32 on the same device. FLOPs are those
of the pairs that are seen. Times are medians after warming up. "Expected" was written before a GPU was there.
"""

import argparse
import functools
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.flex import flex
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.cross_entropy import LogitOptions, pad_row_length

PRODUCTS = {
    "8192 × 8192 × 8192": ((8192, 8192, 8192), "790"),
    "124M, QKV: 16384 × 768 × 2304": ((16384, 768, 2304), "550"),
    "124M, up: 16384 × 768 × 3072": ((16384, 768, 3072), "580"),
    "124M, logits: 4096 × 768 × 50304": ((4096, 768, 50304), "600"),
    "124M, logits, 50257 columns": ((4096, 768, 50257), "350"),
    "1.3B, up: 16384 × 2048 × 8192": ((16384, 2048, 8192), "700"),
    "6.7B, up: 8192 × 4096 × 16384": ((8192, 4096, 16384), "750"),
}
"""Name → M, K, N and the TFLOP/s expected of an H200."""
ATTENTION = {"124M": (16, 12, 1024, 64), "1.3B": (4, 16, 2048, 128), "long": (1, 16, 16384, 128)}
"""Name → rows, heads, tokens, head width."""
EXPECTED = {
    "flash": "350 – 450", "cudnn": "450 – 600", "efficient": "150 – 200", "flex": "300 – 400", "varlen": "350 – 450",
}  # fmt: skip
"""Kernel → TFLOP/s expected of an H200."""

Passes = Callable[[], tuple[Tensor, ...]]
"""A function that returns output and gradients."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention, and how many documents a row holds."""

    name: str
    rows: int
    heads: int
    tokens: int
    width: int
    documents: int

    @property
    def flops(self) -> float:
        """Count forward and backward, of the pairs that are seen: 2 products forward, 5 backward."""
        length = self.tokens / self.documents
        pairs = self.rows * self.heads * self.documents * length * (length + 1) / 2
        return 7 * 2 * pairs * self.width


def time_calls(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call, device work included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        run()
    wait()
    return statistics.median(common.time_call(lambda: (run(), wait())) for _ in range(repeats))


def measure_copies(device: torch.device, repeats: int, elements: int) -> Iterator[str]:
    a, b = (torch.zeros(elements, dtype=torch.bfloat16, device=device) for _ in range(2))
    rate = 2 * a.nbytes / time_calls(lambda: b.copy_(a), device, repeats)
    yield f"| copy of {a.nbytes / 1e9:.2f} GB | {rate / 1e12:.2f} TB/s read and written | 4.3 |"


def measure_matmuls(device: torch.device, repeats: int, shrink: int) -> Iterator[str]:
    for name, ((m, k, n), expected) in PRODUCTS.items():
        a = torch.randn(m // shrink, k // shrink, device=device, dtype=torch.bfloat16)
        b = torch.randn(n // shrink, k // shrink, device=device, dtype=torch.bfloat16)
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[0]
        rate = flops / time_calls(functools.partial(F.linear, a, b), device, repeats)
        yield f"| {name} | {rate / 1e12:,.1f} TFLOP/s | {expected} |"


def measure_cross_entropy(device: torch.device, repeats: int) -> Iterator[str]:
    """Time the Triton kernel of the cross-entropy, as GPT-2 124M calls it; nothing on a CPU."""
    if device.type == "cpu":
        return
    from megatfm.ops.cross_entropy_triton import to_gradients

    tokens, vocabulary, expected = 16 * 1024, 50257, 1.15
    logits = torch.randn(tokens, pad_row_length(vocabulary), device=device, dtype=torch.bfloat16)[:, :vocabulary]
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def run() -> Tensor:
        return to_gradients(logits, targets, LogitOptions())

    milliseconds = 1e3 * time_calls(run, device, repeats)
    yield f"| cross-entropy of {tokens:,} tokens over {vocabulary:,} | {milliseconds:.2f} ms | {expected} |"


def make_sdpa_kernel(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, Shape], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        if shape.documents > 1 and backend not in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            raise NotImplementedError("takes no mask of documents")
        mask = None if shape.documents == 1 else make_mask(make_sequence(shape, q.device))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    return run


def make_sequence(shape: Shape, device: torch.device) -> SequenceMetadata:
    index = torch.arange(shape.tokens, device=device).expand(shape.rows, -1)
    length = shape.tokens // shape.documents
    return SequenceMetadata(index % length, None if shape.documents == 1 else index // length)


def make_mask(row: SequenceMetadata) -> Tensor:
    causal = torch.ones(row.length, row.length, dtype=torch.bool, device=row.positions.device).tril()
    same_document = row.same_document()
    return causal if same_document is None else causal & same_document


def attend_with_flex(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Flex attention as the models call it."""
    mask = PatternMask(Full(causal=True), make_sequence(shape, q.device), 0, shape.heads)
    return flex(q, k, v, mask, None, AttentionOptions(), None)


def attend_with_varlen(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Attend by torch.nn.attention.varlen to all documents, concatenated."""
    from torch.nn.attention.varlen import varlen_attn

    length = shape.tokens // shape.documents
    starts = torch.arange(0, shape.rows * shape.tokens + 1, length, dtype=torch.int32, device=q.device)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    has_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if has_window else {"is_causal": True}
    output = varlen_attn(flat_q, flat_k, flat_v, starts, starts, length, length, **causal)
    assert isinstance(output, Tensor)
    return output.unflatten(0, (shape.rows, -1)).transpose(1, 2)


KERNELS = {
    "flash": make_sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "cudnn": make_sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    "efficient": make_sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "flex": attend_with_flex,
    "varlen": attend_with_varlen,
}


def measure_attention(device: torch.device, repeats: int, shapes: list[Shape]) -> Iterator[str]:
    for shape in shapes:
        size = (shape.rows, shape.heads, shape.tokens, shape.width)
        inputs = [torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        grad_output = torch.randn(size, device=device, dtype=torch.bfloat16)
        exact = compute_reference(inputs, grad_output, shape) if shape.tokens <= 2048 else None
        for name, kernel in KERNELS.items():
            passes = functools.partial(run_passes, kernel, inputs, grad_output, shape)
            try:
                cells = measure_kernel(name, passes, exact, shape.flops, device, repeats)
            except Exception as error:
                cells = f"{common.format_error(error)} | {EXPECTED[name]} | | |"
            yield f"| {shape.name}, {shape.documents} documents a row | {name} | {cells}"


def measure_kernel(
    name: str, passes: Passes, exact: tuple[Tensor, ...] | None, flops: float, device: torch.device, repeats: int
) -> str:
    """Return the cells of a kernel. exact: output and gradients in float32, if they were computed."""
    values = passes()
    finite = all(bool(x.isfinite().all()) for x in values)
    error = "–" if exact is None else f"{max(map(compute_relative_error, values, exact)):.1e}"
    rate = flops / time_calls(passes, device, repeats)
    return f"{rate / 1e12:,.1f} | {EXPECTED[name]} | {'yes' if finite else '**NO**'} | {error} |"


def run_passes(
    kernel: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor, shape: Shape
) -> tuple[Tensor, ...]:
    output = kernel(*inputs, shape)
    return output, *torch.autograd.grad(output, inputs, grad_output)


def compute_reference(inputs: list[Tensor], grad_output: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """Return output and gradients in float32 by SDPA's math backend, a row at a time."""
    mask = make_mask(make_sequence(replace(shape, rows=1), grad_output.device))
    by_row = []
    for number in range(shape.rows):
        leaves = [x[number : number + 1].detach().float().requires_grad_() for x in inputs]
        with sdpa_kernel(SDPBackend.MATH):
            q, k, v = leaves
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(output, leaves, grad_output[number : number + 1].float())
        by_row.append((output.detach(), *gradients))
    return tuple(map(torch.cat, zip(*by_row, strict=True)))


def compute_relative_error(values: Tensor, exact: Tensor) -> float:
    return float((values.detach().float() - exact).norm() / exact.norm())


@common.argument("--tiny", action="store_true", help="small shapes on the CPU: does the script work?")
@common.argument("--repeats", type=int, default=10)
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-gpu-facts.md")
def main(args: argparse.Namespace) -> int:
    """Print and write the tables, anew after each row; 1 where a number is not finite."""
    device = torch.device("cpu" if args.tiny else "cuda")
    repeats, elements, shrink = (1, 2**12, 256) if args.tiny else (args.repeats, 2**31, 1)
    shapes = [Shape(name, *size, documents) for name, size in ATTENTION.items() for documents in (1, 8)]
    if args.tiny:
        shapes = [Shape("tiny", 2, 2, 256, 64, documents) for documents in (1, 2)]
    torch.manual_seed(0)
    page = common.Page(
        common.make_dated_path(args.out, "gpu-facts.md"),
        "What a GPU can do",
        f"{common.get_device_name(device.type)}, torch {torch.__version__}.",
    )
    page.add(table="| Copies and products | measured | expected |")
    for rows in (
        measure_copies(device, repeats, elements),
        measure_matmuls(device, repeats, shrink),
        measure_cross_entropy(device, repeats),
    ):
        for row in rows:
            page.add(row)
    page.add(table="| Attention, both passes | kernel | TFLOP/s | expected | finite | error |")
    for row in measure_attention(device, repeats, shapes):
        page.add(row)
    return int(any("**NO**" in line for line in page.lines))


if __name__ == "__main__":
    sys.exit(common.run_script(__doc__, main))
