"""Fused attention of CPUs and GPUs with its log-sum-exp, so that results over several sets of keys can be added up.

`scaled_dot_product_attention` runs the same kernels, but keeps the log-sum-exp to itself.
"""

import torch
from torch import Tensor

from megatfm.ops.log_once import constant_when_compiled
from megatfm.ops.torch_private import flash_on_cpu, flash_on_cpu_backward, flash_on_cuda, flash_on_cuda_backward

# B batch, N query heads, K key-value heads (N or 1, on a GPU any divisor of N), T queries, S keys, H head width

FLASH_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float16),
}
"""Dtypes of the fused kernel of each kind of device."""

FLASH_MAX_WIDTH = 256
"""Largest head width of FlashAttention on a GPU; widths must be multiples of 8."""

FLASH_CAPABILITY = (8, 0)
"""Lowest compute capability with FlashAttention, and with bfloat16 in any fused kernel (Ampere)."""


def has_flash(q: Tensor, width: int) -> bool:
    """Return whether q's device has a fused kernel for its dtype and heads of `width`, in both passes."""
    supports_width = q.device.type == "cpu" or (width % 8 == 0 and width <= FLASH_MAX_WIDTH)
    is_supported = supports_device(q.device) and has_backward(q.device, width)
    return q.dtype in FLASH_DTYPES.get(q.device.type, ()) and supports_width and is_supported


@constant_when_compiled
def supports_device(device: torch.device) -> bool:
    """Return whether fused attention runs on a device at all: on a GPU that FlashAttention supports, or on a CPU.

    A GPU that torch does not see, as of a tensor without memory, counts as one that does.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


@constant_when_compiled
def has_backward(device: torch.device, width: int) -> bool:
    """Return whether fused attention has a backward pass for heads of `width` on a device that it runs on.

    FlashAttention has none for 193 to 224 channels on GPUs with less shared memory
    (`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120` in torch's sdp_utils.cpp).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability(device)
    is_small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return not (is_small and 192 < width <= 224)


def run_flash(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return output [B, N, T, H] and log-sum-exp [B, N, T].

    bias: added to the scores, on a CPU alone. causal: the i-th query sees keys up to the i-th; T = S.
    """
    if q_BNTH.device.type == "cpu":
        k_BNSH, v_BNSH = (x.expand(-1, q_BNTH.shape[1], -1, -1) for x in (k_BKSH, v_BKSH))
        out, lse = flash_on_cpu(q_BNTH, k_BNSH, v_BNSH, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        out, lse, *_ = flash_on_cuda(q_BNTH, k_BKSH, v_BKSH, 0.0, causal, scale=scale)
    return out, lse


def run_flash_backward(
    g_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNTH: Tensor,
    lse_BNT1: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; on a CPU those of k and v for each head of queries.

    out, lse: over all keys, of which these may be a part.
    """
    lse_BNT = lse_BNT1[..., 0]
    if q_BNTH.device.type == "cpu":
        k_BNSH, v_BNSH = (x.expand(-1, q_BNTH.shape[1], -1, -1) for x in (k_BKSH, v_BKSH))
        inputs = g_BNTH, q_BNTH, k_BNSH, v_BNSH, out_BNTH, lse_BNT
        dq, dk, dv = flash_on_cpu_backward(*inputs, 0.0, causal, attn_mask=bias, scale=scale)
        return dq, dk, dv
    no_seed = torch.empty(2, dtype=torch.uint64, device=q_BNTH.device)  # dropout's, which is off
    inputs = g_BNTH, q_BNTH, k_BKSH, v_BKSH, out_BNTH, lse_BNT.contiguous()
    lengths = None, None, q_BNTH.shape[2], k_BKSH.shape[2]
    dq, dk, dv = flash_on_cuda_backward(*inputs, *lengths, 0.0, causal, no_seed, no_seed, scale=scale)
    return dq, dk, dv
