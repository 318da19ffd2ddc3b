"""Attention with dropout, document by document, against that of a mask of all pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns.local import Full, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import reference
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.mask import DocumentSpans
from megatfm.ops.attention.reference import (
    AttentionOptions,
    attend_by_document,
    attention_reference,
    is_faster_by_document,
)
from tests.support.tensors import assert_same_gradients, draw

N, T, H = 4, 45, 3
LENGTHS = ([3, 9, 1, 17, 8, -7], [20, 2, 2, 13, -8], [-45])
"""Lengths of each row's documents; negative: padding."""
PATTERNS = {"all": Full(), "causal": Full(causal=True)}


@pytest.fixture(autouse=True)
def always_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORES_OF_OVERHEAD", 0)


def pack_documents(*, prefix: bool = False) -> SequenceMetadata:
    documents = [
        [number if length > 0 else -1 for number, length in enumerate(row) for _ in range(abs(length))]
        for row in LENGTHS
    ]
    positions = [[place for length in row for place in range(abs(length))] for row in LENGTHS]
    in_prefix = torch.tensor(positions) < 2 if prefix else None
    return SequenceMetadata(torch.tensor(positions), torch.tensor(documents), prefix=in_prefix)


def draw_inputs(kv_heads: int) -> list[Tensor]:
    """Queries, keys and values; values are wider."""
    shapes = [(len(LENGTHS), T, n, h) for n, h in ((N, H), (kv_heads, H), (kv_heads, H + 2))]
    return [draw(*shape, seed=seed).transpose(1, 2).requires_grad_() for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("kv_heads", "scale"), [(4, None), (2, 0.3)])
def test_output_and_gradients_equal_those_of_a_dense_mask(
    pattern: str, kv_heads: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, inputs = PatternMask(PATTERNS[pattern], pack_documents()), draw_inputs(kv_heads)
    rng_keys = torch.randint(-(2**62), 2**62, (len(LENGTHS), N, T))
    options = AttentionOptions(scale, dropout=0.3)
    expected = attention_reference(*inputs, mask, None, options, rng_keys)
    monkeypatch.setattr(reference, "attention_reference", None)
    actual = attend_by_document(*inputs, mask, None, options, rng_keys)
    assert_same_gradients(actual, expected, inputs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("pattern", "sequence"), [
    (Window(3, 3), pack_documents()),
    (Full(), pack_documents(prefix=True)),
    (Full(), SequenceMetadata(torch.arange(T).expand(3, T))),
    (Full(), SequenceMetadata(torch.arange(T).expand(3, T), torch.zeros(3, T, dtype=torch.int64))),
])  # fmt: skip
def test_other_masks_and_unpacked_rows_use_the_reference(
    pattern: AttentionPattern, sequence: SequenceMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "attention_reference", lambda *inputs: "all pairs")
    rng_keys = torch.zeros(3, N, T, dtype=torch.int64)
    mask = PatternMask(pattern, sequence)
    output = attend_by_document(*draw_inputs(2), mask, None, AttentionOptions(dropout=0.1), rng_keys)
    assert output == "all pairs"


def test_many_short_documents_use_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [(0, start, start + 8) for start in range(0, 256, 8)]
    assert is_faster_by_document(DocumentSpans(spans, causal=False), 1, 4, 256)  # by the scores alone
    monkeypatch.setattr(reference, "SCORES_OF_OVERHEAD", 10_000)
    assert not is_faster_by_document(DocumentSpans(spans, causal=False), 1, 4, 256)
    assert is_faster_by_document(DocumentSpans([(0, 0, 128), (0, 128, 256)], causal=False), 1, 4, 256)


@pytest.mark.parametrize(("changes", "name"), [
    ({}, "documents"), ({"has_dropout": False}, "fused"), ({"sinks": True}, "products"),
    ({"bias": torch.zeros(N, T, T)}, "products"), ({"options": AttentionOptions(softcap=2.0)}, "products"),
])  # fmt: skip
def test_dropout_in_packed_rows_chooses_the_kernel_by_document(changes: dict[str, Any], name: str) -> None:
    q, k, _ = draw_inputs(2)
    options = {"options": AttentionOptions(dropout=0.1), "has_dropout": True, **changes}
    request = AttentionRequest.from_inputs(q, k, PatternMask(Full(), pack_documents()), **options)
    assert choose_kernel(request).name == name
