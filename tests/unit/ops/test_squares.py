"""Sums of squares against float64."""

import pytest
import torch

from megatfm.ops.squares import CHUNK_ELEMENTS, sum_of_squares


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-5)]
)
def test_sums_of_squares_are_those_of_float64(dtype, tolerance):
    torch.manual_seed(0)
    shapes = [(), (0,), (3, 7), (CHUNK_ELEMENTS,), (CHUNK_ELEMENTS + 1,), (5, CHUNK_ELEMENTS // 2)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    tensors.append(torch.randn(40, 30, dtype=torch.float64).to(dtype).t())
    actual = sum_of_squares(tensors)
    assert actual.dtype == torch.float64
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(actual) == pytest.approx(expected, rel=tolerance)


def test_a_large_table_adds_up_to_float32s_precision():
    """As large as GPT-2's embedding, at which torch's own norm of float32 has lost a thousandth."""
    tensor = torch.randn(50257, 768, generator=torch.Generator().manual_seed(0))
    expected = sum(float(rows.double().square().sum()) for rows in tensor.split(1000))
    assert float(sum_of_squares([tensor])) == pytest.approx(expected, rel=1e-7)


def test_what_is_not_finite_shows():
    assert sum_of_squares([torch.ones(3), torch.tensor([1.0, torch.inf])]).isinf()
    assert sum_of_squares([torch.ones(3), torch.tensor([1.0, torch.nan])]).isnan()


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.empty(0, 7), torch.empty(3, 0)]])
def test_of_nothing_it_is_zero(tensors):
    """As on a rank of which all shards are empty."""
    actual = sum_of_squares(tensors)
    assert actual.dtype == torch.float64
    assert float(actual) == 0.0
