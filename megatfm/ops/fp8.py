"""Products of matrices in 8-bit floats (Micikevicius et al. 2022): numbers of e4m3, or e5m2, each times a scale.

Scales follow from the very tensor that is multiplied, and are powers of two, so dividing by them loses nothing, and two
tensors that share an element round it alike unless it is 2⁻¹⁴ of their largest or smaller.

| Scales | Forward | Gradient to the input | Gradient to the weight |
|---|---|---|---|
| rowwise: one for each vector that is multiplied | e4m3 · e4m3 | e4m3 · e4m3 | in the input's own dtype |
| tensorwise: one for each tensor | e4m3 · e4m3 | e5m2 · e4m3 | e5m2 · e4m3 |

Rowwise, what is made of a token depends on no other token, nor on how the batch is divided.

Where tensor parallelism cuts what is multiplied, each rank scales its own part: no coarser than the whole, and with the
same numbers but for those below 2⁻¹⁴ of the largest, which are then off by less. Nothing need be agreed on.
"""

from typing import Any

import torch
from torch import Tensor

from megatfm.ops.torch_private import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""The kernels want dims that this divides."""
SMALLEST_SCALE = 2.0**-100
"""Instead of 0, of zeros alone."""

WITH_FP8 = (8, 9)
"""The lowest compute capability of GPUs that multiply so: Ada and Hopper."""

# M vectors of one matrix, N of the other, K along which they are multiplied


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has these products; on a CPU torch has them, slowly."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= WITH_FP8


def compute_scales(x: Tensor, rowwise: bool, largest: float) -> Tensor:
    """Powers of two, float32 [M, 1] or [1, 1], that divide x [M, K] into at most `largest`."""
    amax = x.abs().amax(1, keepdim=True) if rowwise else x.abs().amax().view(1, 1)
    min_scale = amax.float() / largest
    # A mantissa that isn't zero carries into the exponent.
    power = ((min_scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return power.clamp(min=SMALLEST_SCALE)


def quantise(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """x divided by its scale, in 8 bits."""
    return (x * scale.reciprocal().to(x.dtype)).to(kind)


def product(
    left_MK: Tensor, right_NK: Tensor, rowwise: bool, dtype: torch.dtype, *, use_fast_accum: bool
) -> Tensor:
    """left · rightᵀ [M, N] in left's dtype, with left in `dtype` and right in e4m3. use_fast_accum: sums are kept in
    fewer bits, where a GPU has that. Of bfloat16, float32 or float64: what float16 holds, a scale may leave it."""
    assert left_MK.dtype != torch.float16, "fp8 is of bfloat16: train.precision = 'fp8'"
    if not (left_MK.numel() and right_NK.numel()):  # which have no largest number, and no kernel
        return left_MK.new_zeros(len(left_MK), len(right_NK))
    numbers, factors = [], []
    for x, kind in ((left_MK, dtype), (right_NK, E4M3)):
        scale = compute_scales(x, rowwise, torch.finfo(kind).max)
        numbers.append(quantise(x, scale, kind).contiguous())
        factors.append(scale)
    if left_MK.dtype == torch.float64:  # what the same numbers give without rounding their product
        left, right = (n.double() * f.double() for n, f in zip(numbers, factors, strict=True))
        return left @ right.T
    left_scale, right_scale = factors if rowwise else (f.view(()) for f in factors)
    return scaled_mm(
        numbers[0],
        numbers[1].t(),
        scale_a=left_scale,
        scale_b=right_scale.t() if rowwise else right_scale,
        out_dtype=left_MK.dtype,
        use_fast_accum=use_fast_accum,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        out = product(x.reshape(-1, x.shape[-1]), weight, rowwise, E4M3, use_fast_accum=True)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x_MK, gradient_MN = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        kind, to_x, to_weight = E4M3 if ctx.rowwise else E5M2, None, None
        if ctx.needs_input_grad[0]:
            to_x = product(gradient_MN, weight.T, ctx.rowwise, kind, use_fast_accum=False).view_as(x)
        if ctx.needs_input_grad[1] and (ctx.rowwise or x_MK.shape[0] % ALIGNMENT):
            to_weight = gradient_MN.T @ x_MK
        elif ctx.needs_input_grad[1]:
            to_weight = product(gradient_MN.T, x_MK.T, False, kind, use_fast_accum=False)
        return to_x, to_weight, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rowwise: bool = True) -> Tensor:
    """x Wᵀ (+ b) and its gradients by products of 8-bit floats; x [..., K] and W [N, K] with K and N multiples of 16.

    Where a micro-batch's vectors are no multiple of 16, the gradient to the weight is made in x's own dtype.
    """
    out: Tensor = _Linear.apply(x, weight, rowwise)
    return out if bias is None else out + bias
