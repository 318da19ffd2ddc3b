"""Attention by torch's fused kernels, through `scaled_dot_product_attention`."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatfm.ops.attention.flash import FLASH_MAX_WIDTH, has_backward, supports_device
from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions, zero_blind_queries
from megatfm.ops.attention.relative_bias import expand_bias
from megatfm.ops.log_once import constant_when_compiled, log_once

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width

LONG = 1024
"""Number of queries above which a CPU pads heads of two widths to one."""

UNMASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION]
"""FlashAttention supports no mask, and cuDNN's backward pass under one gives NaN on Hopper GPUs (pytorch issue
196678)."""


def sdpa_attention(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    options: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` without soft cap, dropout and sinks; causal only if T = S."""
    causal, mask_tensor = mask.builtin_mask == "causal", mask.mask()
    mask_in_bias = None if bias is None else mask_tensor
    if bias is not None:
        mask_tensor = _mask_bias(expand_bias(bias.to(q_BNTH.dtype), k_BKSH.shape[2]), mask_tensor, causal)
    groups = q_BNTH.shape[1] // k_BKSH.shape[1]
    allowed = choose_backends(q_BNTH, v_BKSV.shape[-1], masked=mask_tensor is not None)
    if allowed and groups > 1 and not _supports_flash(q_BNTH, v_BKSV.shape[-1], masked=mask_tensor is not None):
        # Only FlashAttention supports key heads shared by query heads; torch would choose no other kernel.
        k_BKSH, v_BKSV = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSV))
    width, v_width = q_BNTH.shape[-1], v_BKSV.shape[-1]
    scale = options.compute_scale(width)
    if q_BNTH.device.type == "cpu" and width != v_width and q_BNTH.shape[2] >= LONG:
        # The fused CPU kernel needs equal head widths; torch would hold all scores at once instead.
        max_width = max(width, v_width)
        q_BNTH, k_BKSH = (F.pad(x, (0, max_width - width)) for x in (q_BNTH, k_BKSH))
        v_BKSV = F.pad(v_BKSV, (0, max_width - v_width))
    with _allow_only(allowed):
        out_BNTV = F.scaled_dot_product_attention(
            q_BNTH,
            k_BKSH,
            v_BKSV,
            attn_mask=mask_tensor,
            is_causal=causal and bias is None,
            scale=scale,
            enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
        )
    # For queries that see no key, torch returns 0 with a boolean mask, but the mean of all values with a bias.
    return zero_blind_queries(out_BNTV[..., :v_width], mask_in_bias)


def choose_backends(q_BNTH: Tensor, v_width: int, *, masked: bool) -> list[SDPBackend]:
    """Return the kernels that torch may choose from on a GPU; empty: any.

    Empty on a CPU, and if no fused kernel supports the dtype or the head widths, which is logged.
    """
    if q_BNTH.device.type != "cuda":
        return []
    widths = q_BNTH.shape[-1], v_width
    is_unsupported_bf16 = q_BNTH.dtype == torch.bfloat16 and not supports_device(q_BNTH.device)
    if q_BNTH.dtype == torch.float64 or is_unsupported_bf16 or any(width % 8 for width in widths):
        _warn_unfused(q_BNTH.dtype, *widths)
        return []
    return MASKED_BACKENDS if masked else UNMASKED_BACKENDS


def _supports_flash(q_BNTH: Tensor, v_width: int, *, masked: bool) -> bool:
    """Return whether FlashAttention supports a call on a GPU, in both passes."""
    width, is_half = q_BNTH.shape[-1], q_BNTH.dtype in (torch.bfloat16, torch.float16)
    is_supported = supports_device(q_BNTH.device) and has_backward(q_BNTH.device, width)
    return not masked and is_half and width == v_width <= FLASH_MAX_WIDTH and is_supported


def _allow_only(backends: list[SDPBackend]) -> AbstractContextManager[None]:
    return sdpa_kernel(backends) if backends else nullcontext()


@constant_when_compiled
def _warn_unfused(dtype: torch.dtype, k_width: int, v_width: int) -> None:
    log_once(
        f"attention in {str(dtype)[6:]} with heads of {k_width} channels (values: {v_width}): no fused kernel of this "
        "GPU supports that, so that all scores are held at once; choose bf16 (before Ampere: fp16 or fp32), and heads "
        "of a multiple of 8 channels",
        logging.WARNING,
    )


def _mask_bias(bias_BNTS: Tensor, mask_B1TS: Tensor | None, causal: bool) -> Tensor:
    if causal:
        mask_B1TS = torch.ones(bias_BNTS.shape[-2:], dtype=torch.bool, device=bias_BNTS.device).tril()
    if mask_B1TS is None:
        return bias_BNTS
    return bias_BNTS.masked_fill(~mask_B1TS, torch.finfo(bias_BNTS.dtype).min)
