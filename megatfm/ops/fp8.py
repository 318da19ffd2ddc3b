"""Matrix multiplication in 8-bit floats (Micikevicius et al. 2022), e4m3 or e5m2 with dynamic scaling.

Scales are computed from the current tensor and rounded to powers of two. Dividing by them is exact, and an element
rounds the same in any tensor whose maximum is less than 2¹⁴ times larger.

| Scales | Forward | Gradient to the input | Gradient to the weight |
|---|---|---|---|
| rowwise: one for each vector | e4m3 · e4m3 | e4m3 · e4m3 | in the input's own dtype |
| tensorwise: one for each tensor | e4m3 · e4m3 | e5m2 · e4m3 | e5m2 · e4m3 |

With rowwise scales, a token's result does not depend on other tokens or on the division of the batch.

Under tensor parallelism each rank scales its own shard, without communication. Results equal those of the full tensor,
except for elements below 2⁻¹⁴ of the maximum, which a shard rounds more finely.
"""

from typing import Any

import torch
from torch import Tensor

from megatfm.ops.torch_private import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""Kernels need dims that are multiples of this."""
SMALLEST_SCALE = 2.0**-100
"""Scale of an all-zero tensor, to avoid division by 0."""

MIN_COMPUTE_CAPABILITY = (8, 9)
"""Lowest compute capability with fp8 matrix multiplication (Ada; Hopper is 9.0)."""

# M vectors of one matrix, N of the other, K along which they are multiplied


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether the device supports fp8 matmuls. CPUs do, slowly."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY


def compute_scales(x: Tensor, rowwise: bool, largest: float) -> Tensor:
    """Return powers of two, float32 [M, 1] or [1, 1], such that x / scale is at most `largest`."""
    amax = x.abs().amax(1, keepdim=True) if rowwise else x.abs().amax().view(1, 1)
    min_scale = amax.float() / largest
    # Round up to a power of two: a nonzero mantissa carries into the exponent.
    power = ((min_scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return power.clamp(min=SMALLEST_SCALE)


def quantise(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """Return x divided by its scale, in 8 bits."""
    return (x * scale.reciprocal().to(x.dtype)).to(kind)


def multiply_fp8(
    left_MK: Tensor, right_NK: Tensor, rowwise: bool, dtype: torch.dtype, *, use_fast_accum: bool
) -> Tensor:
    """Return left · rightᵀ [M, N] in left's dtype, with left quantised to `dtype` and right to e4m3.

    use_fast_accum: accumulate in fewer bits on GPUs. Not for float16, whose range scaled results can exceed.
    """
    assert left_MK.dtype != torch.float16, "fp8 products need bfloat16, not float16: set train.precision = 'fp8'"
    if not (left_MK.numel() and right_NK.numel()):  # no maximum, and kernels reject empty tensors
        return left_MK.new_zeros(len(left_MK), len(right_NK))
    quantised, scales = [], []
    for x, kind in ((left_MK, dtype), (right_NK, E4M3)):
        scale = compute_scales(x, rowwise, torch.finfo(kind).max)
        quantised.append(quantise(x, scale, kind).contiguous())
        scales.append(scale)
    if left_MK.dtype == torch.float64:  # reference: the quantised values multiplied without rounding
        left, right = (x.double() * scale.double() for x, scale in zip(quantised, scales, strict=True))
        return left @ right.T
    left_scale, right_scale = scales if rowwise else (scale.view(()) for scale in scales)
    return scaled_mm(
        quantised[0],
        quantised[1].t(),
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
        out = multiply_fp8(x.reshape(-1, x.shape[-1]), weight, rowwise, E4M3, use_fast_accum=True)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x_MK, gradient_MN = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        kind, x_grad, weight_grad = E4M3 if ctx.rowwise else E5M2, None, None
        if ctx.needs_input_grad[0]:
            x_grad = multiply_fp8(gradient_MN, weight.T, ctx.rowwise, kind, use_fast_accum=False).view_as(x)
        if ctx.needs_input_grad[1] and (ctx.rowwise or x_MK.shape[0] % ALIGNMENT):
            weight_grad = gradient_MN.T @ x_MK
        elif ctx.needs_input_grad[1]:
            weight_grad = multiply_fp8(gradient_MN.T, x_MK.T, False, kind, use_fast_accum=False)
        return x_grad, weight_grad, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rowwise: bool = True) -> Tensor:
    """Compute x Wᵀ (+ b) and its gradients in fp8; x [..., K], W [N, K], K and N multiples of 16.

    If the number of vectors in x is no multiple of 16, the weight gradient is computed in x's dtype.
    """
    out: Tensor = _Linear.apply(x, weight, rowwise)
    return out if bias is None else out + bias
