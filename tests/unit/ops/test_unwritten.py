"""Kernels read no unwritten memory: on memory that conftest.py fills with NaN, all results are numbers.

oneDNN's products of bfloat16 with AMX read a row of 50 numbers up to its 64th, and multiply by zero what is there. So
sizes here are no multiples of anything, and larger than the tiles of such kernels.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Fixed, Full, Longformer, Strided, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.cross_entropy import LogitOptions, cross_entropy, cross_entropy_reference
from megatfm.ops.moe import KERNELS, choose_grouped_kernel, grouped_linear

DTYPES = [torch.bfloat16, torch.float32]
B, N, T, H = 2, 4, 77, 20
PATTERNS = [
    Full(causal=True), Full(), Window(10), Window(7, 9), Window(12, step=3), Window(9, first=3),
    Chunked(20, causal=True), Strided(9, causal=True), Fixed(12, 2, causal=True), BigBird(4, 1, 0, N),
    Longformer(9, (0, 17)),
]  # fmt: skip


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def assert_finite(outputs: Tensor, inputs: list[Tensor]) -> None:
    assert outputs.isfinite().all()
    for gradient in torch.autograd.grad(outputs.float().square().sum(), inputs):
        assert gradient.isfinite().all()


def test_new_memory_is_filled_with_nan() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50, 97])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_cross_entropy_reads_no_unwritten_memory(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    hidden, weight = draw(rows, 48, dtype=dtype), draw(vocabulary, 48, dtype=dtype)
    targets, bias = torch.arange(rows) % vocabulary, draw(vocabulary, dtype=dtype)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    variant = LogitOptions(2.5, 0.1)
    exact = cross_entropy_reference(hidden.double(), weight.double(), targets, bias.double(), variant)
    for chunk in (33, 512):
        actual = cross_entropy(hidden, weight, targets, bias, variant, chunk=chunk)
        assert_finite(actual, inputs)
        assert float(actual.detach()) == pytest.approx(float(exact.detach()), rel=2e-2)


def run_chosen_kernel(q: Tensor, k: Tensor, v: Tensor, pattern_mask: PatternMask) -> Tensor:
    return choose_kernel(AttentionRequest.from_inputs(q, k, pattern_mask, AttentionOptions(), has_dropout=False)).run(
        q, k, v, pattern_mask, None, AttentionOptions(), None
    )


def run_block_sparse(q: Tensor, k: Tensor, v: Tensor, pattern_mask: PatternMask) -> Tensor:
    return block_sparse.block_sparse_attention(q, k, v, pattern_mask, None, AttentionOptions(), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("function", [run_chosen_kernel, run_block_sparse, attention_reference])
def test_attention_reads_no_unwritten_memory(
    function: Callable[..., Tensor], pattern: AttentionPattern, dtype: torch.dtype
) -> None:
    q, k, v = (draw(B, n, T, H, dtype=dtype).requires_grad_() for n in (N, 2, 2))
    documents = torch.tensor([[0] * 19 + [1] * 41 + [-1] * 17, [0] * 24 + [1] * 53])
    for packed in (None, documents):
        pattern_mask = PatternMask(pattern, SequenceMetadata(torch.arange(T).expand(B, T), packed))
        assert_finite(function(q, k, v, pattern_mask), [q, k, v])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 50])
def test_grouped_linear_reads_no_unwritten_memory(width: int, dtype: torch.dtype) -> None:
    ends = torch.tensor([33, 33, 40, 74, 75], dtype=torch.int32)
    x, weight = draw(75, width, dtype=dtype).requires_grad_(), draw(5, 37, width, dtype=dtype).requires_grad_()
    assert_finite(grouped_linear(x, weight, ends), [x, weight])
    assert choose_grouped_kernel(x, weight) in KERNELS
