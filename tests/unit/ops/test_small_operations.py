"""Sums of squares, keyed random numbers, products that compute only wanted gradients, and fp8 products."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.engines.gradients import CHUNK_ELEMENTS, sum_squares
from megatfm.ops import keyed_random
from megatfm.ops.cross_entropy import cross_entropy
from megatfm.ops.fp8 import E4M3, E5M2, compute_scales, fp8_linear, multiply_fp8
from megatfm.ops.keyed_random import GOLDEN, RATE_STEPS
from megatfm.ops.moe import windowed_linear
from tests.support.tensors import OperatorCounter


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-5),
])  # fmt: skip
def test_sums_of_squares_are_those_of_float64(dtype, tolerance):
    torch.manual_seed(0)
    shapes = [(), (0,), (3, 7), (CHUNK_ELEMENTS,), (CHUNK_ELEMENTS + 1,), (5, CHUNK_ELEMENTS // 2)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    tensors.append(torch.randn(40, 30, dtype=torch.float64).to(dtype).t())
    actual = sum_squares(tensors)
    assert actual.dtype == torch.float64
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(actual) == pytest.approx(expected, rel=tolerance)


def test_the_sum_of_squares_of_a_large_table_is_accurate():
    """The table is as large as GPT-2's embedding, for which torch's norm in float32 is off by a thousandth."""
    tensor = torch.randn(50257, 768, generator=torch.Generator().manual_seed(0))
    expected = sum(float(rows.double().square().sum()) for rows in tensor.split(1000))
    assert float(sum_squares([tensor])) == pytest.approx(expected, rel=1e-7)


def test_sums_of_squares_keep_infinities_and_nans():
    assert sum_squares([torch.ones(3), torch.tensor([1.0, torch.inf])]).isinf()
    assert sum_squares([torch.ones(3), torch.tensor([1.0, torch.nan])]).isnan()


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.empty(0, 7), torch.empty(3, 0)]])
def test_the_sum_of_squares_of_nothing_is_zero(tensors):
    """A rank may have empty shards alone."""
    actual = sum_squares(tensors)
    assert actual.dtype == torch.float64
    assert float(actual) == 0.0


WIDTHS = (29, 72, 160)
"""Numbers of tokens and channels that are no multiple of a CPU's vector width."""


def draw_all(keys_B: Tensor) -> list[Tensor]:
    """Draw the random numbers of a compiled model, whose tokens and channels are counted inside the graph."""
    keys_BT = keyed_random.make_token_keys(keys_B, 5, torch.arange(WIDTHS[0]))
    masks = [keyed_random.draw_keep_mask(keys_BT, width, RATE_STEPS // 3) for width in WIDTHS]
    heads = torch.arange(WIDTHS[1])
    return [keys_BT, keyed_random.fold_in(keys_B[:, None], heads), keyed_random.draw_uniform(keys_B, WIDTHS[2]), *masks]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_random_numbers_equal_eager_ones() -> None:
    """From an overflowing product of loop indices, gcc compiled loops that wrote out of bounds."""
    torch.compiler.reset()
    keys_B = torch.randint(-(2**63), 2**63 - 1, (3,), generator=torch.Generator().manual_seed(0))
    result = torch.compile(draw_all, fullgraph=True, dynamic=False)(keys_B)
    for compiled, plain in zip(result, draw_all(keys_B), strict=True):
        assert torch.equal(compiled, plain)


@pytest.mark.parametrize("compiled", [False, True])
def test_multiply_golden_wraps_as_64_bits_do(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.arange(-9, 999), torch.randint(-(2**63), 2**63 - 1, (9999,), generator=generator)])
    expected = [(value * GOLDEN + 2**63) % 2**64 - 2**63 for value in values.tolist()]
    assert keyed_random._multiply_golden(values).tolist() == expected


def test_the_largest_dropout_rate_keeps_some_elements() -> None:
    """One above it is refused, with the rate that would do."""
    largest = 1 - 2**-16
    dropped = keyed_random.dropout(torch.ones(2**18), largest, torch.tensor(7))
    assert set(dropped.unique().tolist()) == {0.0, float(RATE_STEPS)}
    base = {"vocab_size": 31, "d_model": 16, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 16}
    for key in ("dropout", "attention.dropout", "ffn.dropout", "drop_path"):
        assert ModelConfig.from_dotted(**base, **{key: largest})
        with pytest.raises(ValueError, match=f"less than or equal to {largest}"):
            ModelConfig.from_dotted(**base, **{key: 0.999999})


aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.mm.out, aten.addmm.out, aten.addmm_.default, aten._scaled_mm.default}


def compute_loss(x: Tensor, weight: Tensor) -> Tensor:
    return cross_entropy(x, weight, torch.arange(len(x)) % len(weight), chunk=16)


def compute_grouped(x: Tensor, weight: Tensor) -> Tensor:
    return windowed_linear(x, weight.view(2, 16, -1), torch.tensor([20, 32], dtype=torch.int32))


# function: products forward, and for each gradient; a loss computes its gradients in the forward pass
CASES: dict[Callable[..., Tensor], tuple[int, int]] = {
    compute_loss: (2, 2), compute_grouped: (2, 2), fp8_linear: (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_backward_has_only_the_products_it_needs(
    function: Callable[..., Tensor], of_x: bool, of_weight: bool, training: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(32, 16, generator=random).bfloat16() for _ in range(2))
    x.requires_grad_(of_x)
    parameter = nn.Parameter(weight, requires_grad=of_weight)
    forward, products_per_gradient = CASES[function]
    with OperatorCounter(PRODUCTS) as products, nullcontext() if training else torch.no_grad():
        result = function(x, parameter).float().sum()
        if training and (of_x or of_weight):
            result.backward()
    assert products.count == forward + products_per_gradient * training * (of_x + of_weight)
    for tensor, needs_gradient in ((x, of_x), (parameter, of_weight)):
        assert (tensor.grad is not None) == (training and needs_gradient)
    if training and of_x and of_weight:
        expected = torch.autograd.grad(function(x, parameter).float().sum(), (x, parameter))
        torch.testing.assert_close(expected, (x.grad, parameter.grad), rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------- 8-bit floats


M, K, N = 48, 64, 32
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of rounding to the nearest, of numbers that are not subnormal."""


def draw_scaled(*shape: int, seed: int = 0) -> Tensor:
    """Draw vectors of very different norms."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=random, dtype=torch.float64) * sizes


@pytest.mark.parametrize("rowwise", [True, False])
def test_fp8_scales_are_the_least_powers_of_two_that_fit(rowwise: bool) -> None:
    x = draw_scaled(M, K)
    x[3] = 0
    scale = compute_scales(x, rowwise, 448.0)
    assert scale.shape == ((M, 1) if rowwise else (1, 1))
    assert (scale.frexp()[0] == 0.5).all()
    largest = (x / scale).abs().amax(1 if rowwise else (0, 1))
    assert (largest <= 448).all()
    assert ((largest > 224) | (largest == 0)).all()


def test_fp8_nan_and_infinity_spread_to_their_row_alone() -> None:
    for value in (float("nan"), float("inf")):
        x = draw_scaled(M, K).bfloat16()
        x[2, 5] = value
        result = multiply_fp8(x, draw_scaled(N, K).bfloat16(), True, E4M3, use_fast_accum=False)
        assert result[2].isnan().all()
        assert result[torch.arange(M) != 2].isfinite().all()


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_fp8_products_are_as_accurate_as_their_factors(rowwise: bool, kind: torch.dtype) -> None:
    """|l'r' − lr| ≤ (εₗ + εᵣ + εₗεᵣ)·|l||r|, and what is too small for a tensor's one scale."""
    left, right = draw_scaled(M, K).bfloat16().double(), draw_scaled(N, K, seed=1).bfloat16().double()
    actual = multiply_fp8(left, right, rowwise, kind, use_fast_accum=False)
    errors = (1 + HALF_STEP[kind]) * (1 + HALF_STEP[E4M3]) - 1
    bound = errors * left.abs() @ right.abs().T
    # Half the distance between subnormals of a factor, times the other.
    for x, factor, dtype in ((left, right.T, kind), (right, left.T, E4M3)):
        limits = torch.finfo(dtype)
        tiny = limits.smallest_normal * HALF_STEP[dtype] * compute_scales(x, rowwise, limits.max)
        part = tiny.double().expand(x.shape) @ ((1 + errors) * factor.abs())
        bound = bound + (part if x is left else part.T)
    assert ((actual - left @ right.T).abs() <= bound).all()
    assert (actual - left @ right.T).abs().max() > 1e-4 * bound.max(), "nothing was rounded"
    # torch's kernel multiplies the same numbers, and rounds the result.
    kernel = multiply_fp8(left.bfloat16(), right.bfloat16(), rowwise, kind, use_fast_accum=False).double()
    assert ((kernel - actual).abs() <= 2**-7 * actual.abs() + 2**-20 * left.abs() @ right.abs().T).all()


def compute_output_and_gradients(multiply: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    x, weight, bias, y = (
        draw_scaled(*shape, seed=seed).to(dtype).requires_grad_()
        for seed, shape in enumerate([(3, 16, K), (N, K), (N,), (3, 16, N)])
    )
    result = multiply(x, weight, bias)
    result.backward(y.detach())
    return [result.detach().double(), *(tensor.grad.double() for tensor in (x, weight, bias))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rowwise", [True, False])
def test_fp8_outputs_and_gradients_are_close_to_full_precision(rowwise: bool, dtype: torch.dtype) -> None:
    exact = compute_output_and_gradients(torch.nn.functional.linear, torch.float64)
    actual = compute_output_and_gradients(lambda *inputs: fp8_linear(*inputs, rowwise=rowwise), dtype)
    errors = [float((g - e).norm() / e.norm()) for g, e in zip(actual, exact, strict=True)]
    full_precision_bound = 1e-12 if dtype == torch.float64 else 2**-7
    assert all(0.005 < error < 0.1 for error in errors[:2])
    assert errors[2] < full_precision_bound if rowwise else 0.005 < errors[2] < 0.1
    assert errors[3] < full_precision_bound


def test_an_fp8_output_does_not_depend_on_other_tokens() -> None:
    x, weight = draw_scaled(M, K), draw_scaled(N, K, seed=1)
    assert torch.equal(fp8_linear(x, weight)[5:9], fp8_linear(x[5:9], weight))


@pytest.mark.parametrize("rowwise", [True, False])
def test_fp8_of_no_tokens_is_empty_and_has_zero_gradients(rowwise: bool) -> None:
    x, weight = torch.empty(2, 0, K).bfloat16().requires_grad_(), draw_scaled(N, K).bfloat16().requires_grad_()
    result = fp8_linear(x, weight, rowwise=rowwise)
    assert result.shape == (2, 0, N)
    result.sum().backward()
    assert x.grad.shape == x.shape
    assert (weight.grad == 0).all()


def test_fp8_refuses_float16() -> None:
    """Zeros in it gave NaN: their scale is below what it holds."""
    with pytest.raises(AssertionError, match="fp8 products need bfloat16"):
        fp8_linear(torch.zeros(M, K).half(), draw_scaled(N, K).half())
