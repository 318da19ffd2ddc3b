"""Attention against its reference, and packed documents against each one alone."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import fused, kernels
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.mask import CAUSAL_MASK, FULL_MASK, AttentionMask, DenseMask
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from tests.support.tensors import OperatorRecorder, assert_same_gradients, draw

B, N, T, H = 2, 6, 11, 4
EARLIER = Full(causal=True)


def run_chosen_kernel(q: Tensor, k: Tensor, v: Tensor, pattern_mask: AttentionMask = CAUSAL_MASK) -> Tensor:
    kernel = choose_kernel(AttentionRequest.from_inputs(q, k, pattern_mask, AttentionOptions(), has_dropout=False))
    return kernel.run(q, k, v, pattern_mask, None, AttentionOptions(), None)


def draw_heads(kv_heads: int, queries: int = T) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw(B, N, queries, H), draw(B, kv_heads, T, H, seed=1), draw(B, kv_heads, T, H, seed=2)
    return 2 * q, 2 * k, v


def attend_by_loops(q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
    """Compute attention by loops, exponentials and sums alone."""
    result = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for t in range(q.shape[2]):
                pattern_mask = past + t + 1
                weights = (k[b, n // group, :pattern_mask] @ q[b, n, t] / q.shape[3] ** 0.5).exp()
                result[b, n, t] = weights @ v[b, n // group, :pattern_mask] / weights.sum()
    return result


@pytest.mark.parametrize("function", [run_chosen_kernel, attention_reference])
@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("past", [0, 4])
def test_attention_equals_loops_over_queries(function, kv_heads: int, past: int) -> None:  # type: ignore[no-untyped-def]
    q, k, v = draw_heads(kv_heads, queries=T - past)
    positions = torch.arange(past, T).expand(B, -1)
    pattern_mask = PatternMask(EARLIER, SequenceMetadata(positions, past=past))
    assert (pattern_mask.builtin_mask == "causal") == (past == 0)
    torch.testing.assert_close(function(q, k, v, pattern_mask), attend_by_loops(q, k, v, past))


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_against_the_reference(masked: bool) -> None:
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [-1] * 2]) if masked else None
    pattern_mask = PatternMask(EARLIER, SequenceMetadata(torch.arange(T).expand(B, T), documents))
    inputs = [x.requires_grad_() for x in draw_heads(2)]
    actual, expected = run_chosen_kernel(*inputs, pattern_mask), attention_reference(*inputs, pattern_mask)
    assert_same_gradients(actual, expected, inputs)


@pytest.mark.parametrize("function", [run_chosen_kernel, attention_reference])
def test_a_document_in_a_packed_row_equals_the_document_alone(function) -> None:  # type: ignore[no-untyped-def]
    q, k, v = draw_heads(3)
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1]])
    pattern_mask = PatternMask(EARLIER, SequenceMetadata(torch.arange(T).expand(B, T), documents))
    packed = function(q, k, v, pattern_mask)
    for b in range(B):
        for document in documents[b].unique():
            at = documents[b] == document
            alone = attend_by_loops(q[b : b + 1, :, at], k[b : b + 1, :, at], v[b : b + 1, :, at], 0)
            torch.testing.assert_close(packed[b : b + 1, :, at], alone)


@pytest.mark.parametrize("word", ["causal", "all"])
@pytest.mark.parametrize("of_values", [H - 1, H + 3])
def test_values_may_be_wider_than_keys(
    monkeypatch: pytest.MonkeyPatch, word: Literal["all", "causal"], of_values: int
) -> None:
    """The row is long, so torch would hold all scores."""
    monkeypatch.setattr(fused, "LONG", T)
    q, k, _ = draw_heads(6)
    inputs = [x.requires_grad_() for x in (q, k, draw(B, 6, T, of_values))]
    with OperatorRecorder(lambda operator, *_: [operator]) as operators:
        actual = fused.sdpa_attention(*inputs, DenseMask(word), None, AttentionOptions(), None)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in operators.records
    assert_same_gradients(actual, attention_reference(*inputs, DenseMask(word)), inputs)


def test_both_cpu_kernels_agree_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.bfloat16() for x in draw_heads(2))
    expected = attention_reference(q.double(), k.double(), v.double(), CAUSAL_MASK)
    for limit in (kernels.MATMUL_SCORES, 0):
        monkeypatch.setattr(kernels, "MATMUL_SCORES", limit)
        result = run_chosen_kernel(q, k, v)
        assert result.dtype == torch.bfloat16
        assert (result.double() - expected).abs().max() < 0.05


def test_masks_are_computed_once_for_all_layers() -> None:
    result = []
    layout = SequenceMetadata(torch.arange(3)[None], torch.zeros(1, 3, dtype=torch.int64))
    assert [layout.cached("x", lambda: result.append(1) or len(result)) for _ in range(3)] == [1, 1, 1]
    assert layout.mask(EARLIER) is layout.mask(Full(causal=True))


@pytest.mark.parametrize(("trains_bias", "name"), [(True, "products"), (False, "fused")])
def test_trained_biases_use_the_kernel_of_matmuls(trains_bias: bool, name: str) -> None:
    """On a CPU, as of windows of a map; torch's own way with such a bias also looks for queries that see nothing."""
    q, k, v = (x.float() for x in draw_heads(N))
    bias = draw(1, N, T, T).float().requires_grad_(trains_bias)
    request = AttentionRequest.from_inputs(q, k, FULL_MASK, AttentionOptions(), has_dropout=False, bias=bias)
    kernel = choose_kernel(request)
    assert kernel.name == name
    actual = kernel.run(q, k, v, FULL_MASK, bias, AttentionOptions(), None)
    expected = torch.einsum("bnts,bnsh->bnth", (torch.einsum("bnth,bnsh->bnts", q, k) / H**0.5 + bias).softmax(-1), v)
    torch.testing.assert_close(actual, expected)
