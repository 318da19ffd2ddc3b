"""Products of 8-bit floats: rounding bounded element by element, torch's kernel against the same numbers in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatfm.ops.fp8 import E4M3, E5M2, compute_scales, fp8_linear, multiply_fp8

M, K, N = 48, 64, 32
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of rounding to the nearest, of numbers that are not subnormal."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Vectors of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=random, dtype=torch.float64) * sizes


@pytest.mark.parametrize("rowwise", [True, False])
def test_scales_are_the_least_powers_of_two_that_fit(rowwise: bool) -> None:
    x = drawn(M, K)
    x[3] = 0
    scale = compute_scales(x, rowwise, 448.0)
    assert scale.shape == ((M, 1) if rowwise else (1, 1))
    assert (scale.frexp()[0] == 0.5).all()
    most = (x / scale).abs().amax(1 if rowwise else (0, 1))
    assert (most <= 448).all()
    assert ((most > 224) | (most == 0)).all()


def test_a_number_that_is_none_makes_what_it_touches_none() -> None:
    for value in (float("nan"), float("inf")):
        x = drawn(M, K).bfloat16()
        x[2, 5] = value
        result = multiply_fp8(x, drawn(N, K).bfloat16(), True, E4M3, use_fast_accum=False)
        assert result[2].isnan().all()
        assert result[torch.arange(M) != 2].isfinite().all()


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_element_of_a_product_is_as_near_as_its_factors(rowwise: bool, kind: torch.dtype) -> None:
    """|l'r' − lr| ≤ (εₗ + εᵣ + εₗεᵣ)·|l||r|, and what is too small for a tensor's one scale."""
    left, right = drawn(M, K).bfloat16().double(), drawn(N, K, seed=1).bfloat16().double()
    actual = multiply_fp8(left, right, rowwise, kind, use_fast_accum=False)
    errors = (1 + HALF_STEP[kind]) * (1 + HALF_STEP[E4M3]) - 1
    bound = errors * left.abs() @ right.abs().T
    # Half the distance between subnormals of a factor, times the other.
    for x, other, of in ((left, right.T, kind), (right, left.T, E4M3)):
        tiny = (
            torch.finfo(of).smallest_normal * HALF_STEP[of] * compute_scales(x, rowwise, torch.finfo(of).max)
        )
        part = tiny.double().expand(x.shape) @ ((1 + errors) * other.abs())
        bound = bound + (part if x is left else part.T)
    assert ((actual - left @ right.T).abs() <= bound).all()
    assert (actual - left @ right.T).abs().max() > 1e-4 * bound.max(), "nothing was rounded"
    # torch's kernel multiplies the same numbers, and rounds what it made.
    kernel = multiply_fp8(left.bfloat16(), right.bfloat16(), rowwise, kind, use_fast_accum=False).double()
    assert ((kernel - actual).abs() <= 2**-7 * actual.abs() + 2**-20 * left.abs() @ right.abs().T).all()


def gradients(multiply: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    x, weight, bias, y = (
        drawn(*shape, seed=seed).to(dtype).requires_grad_()
        for seed, shape in enumerate([(3, 16, K), (N, K), (N,), (3, 16, N)])
    )
    result = multiply(x, weight, bias)
    result.backward(y.detach())
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return [result.detach().double(), x.grad.double(), weight.grad.double(), bias.grad.double()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rowwise", [True, False])
def test_output_and_gradients_are_near_those_in_full(rowwise: bool, dtype: torch.dtype) -> None:
    exact = gradients(torch.nn.functional.linear, torch.float64)
    actual = gradients(lambda *inputs: fp8_linear(*inputs, rowwise=rowwise), dtype)
    errors = [float((g - e).norm() / e.norm()) for g, e in zip(actual, exact, strict=True)]
    in_full = 1e-12 if dtype == torch.float64 else 2**-7
    assert all(0.005 < error < 0.1 for error in errors[:2])
    assert errors[2] < in_full if rowwise else 0.005 < errors[2] < 0.1
    assert errors[3] < in_full


def test_a_token_s_output_does_not_depend_on_the_others() -> None:
    x, weight = drawn(M, K), drawn(N, K, seed=1)
    assert torch.equal(fp8_linear(x, weight)[5:9], fp8_linear(x[5:9], weight))


@pytest.mark.parametrize("rowwise", [True, False])
def test_no_tokens_have_no_output_and_no_gradients(rowwise: bool) -> None:
    x, weight = torch.empty(2, 0, K).bfloat16().requires_grad_(), drawn(N, K).bfloat16().requires_grad_()
    result = fp8_linear(x, weight, rowwise=rowwise)
    assert result.shape == (2, 0, N)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert (weight.grad == 0).all()


def test_float16_is_refused() -> None:
    """Zeros in it gave NaN: their scale is below what it holds."""
    with pytest.raises(AssertionError, match="fp8 is of bfloat16"):
        fp8_linear(torch.zeros(M, K).half(), drawn(N, K).half())
