"""Torch's fused attention kernels: through `scaled_dot_product_attention`, with the log-sum-exp, and by documents.

`scaled_dot_product_attention` keeps the log-sum-exp to itself, by which results over several sets of keys are added up.
`torch.nn.attention.varlen.varlen_attn` (Dao 2023; GPUs only) computes documents of different lengths in rows laid end
to end, without a mask.
"""

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatfm.ops.attention.mask import AttentionMask, expand_bias
from megatfm.ops.attention.reference import AttentionOptions, zero_blind_queries
from megatfm.ops.torch_private import (
    constant_when_compiled,
    flash_on_cpu,
    flash_on_cpu_backward,
    flash_on_cuda,
    flash_on_cuda_backward,
)
from megatfm.terminal import log_once

# B batch, N query heads, K key-value heads (with a log-sum-exp N or 1, on a GPU any divisor of N), T queries, S keys
# H head width, V value width, C documents, padded

FLASH_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float16),
}
"""Dtypes of the fused kernel of each kind of device."""

FLASH_MAX_WIDTH = 256
"""Largest head width of FlashAttention on a GPU; widths must be multiples of 8."""

FLASH_CAPABILITY = (8, 0)
"""Lowest compute capability with FlashAttention, and with bfloat16 in any fused kernel (Ampere)."""

LONG = 1024
"""Number of queries above which a CPU pads heads of two widths to one."""

UNMASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION]
"""FlashAttention supports no mask, and cuDNN's backward pass under one gives NaN on Hopper GPUs (pytorch issue
196678)."""


def has_flash(q: Tensor, width: int) -> bool:
    """Return whether q's device has a fused kernel for its dtype and heads of `width`, in both passes."""
    supports_width = q.device.type == "cpu" or (width % 8 == 0 and width <= FLASH_MAX_WIDTH)
    return q.dtype in FLASH_DTYPES.get(q.device.type, ()) and supports_width and supports_device(q.device, width)


@constant_when_compiled
def supports_device(device: torch.device, width: int = 0) -> bool:
    """Return whether fused attention runs on a CPU, or on a GPU that FlashAttention supports, for heads of `width`.

    A GPU that torch does not see, as of a tensor without memory, counts as one that does. FlashAttention has no
    backward pass for 193 to 224 channels on GPUs with less shared memory
    (`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120` in torch's sdp_utils.cpp).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability(device)
    is_small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return capability >= FLASH_CAPABILITY and not (is_small and 192 < width <= 224)


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
    with sdpa_kernel(allowed) if allowed else nullcontext():
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
    fits = width == v_width <= FLASH_MAX_WIDTH and supports_device(q_BNTH.device, width)
    return not masked and is_half and fits


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


MIN_DOCUMENT_LENGTH = 128
"""Mean length of documents for which `cu_seqlens` has entries; for shorter ones it has four times as many, a new shape
for which blocks are compiled again."""

REQUIRED_PARAMETERS = ("scale", "window_size")
"""Parameters of the operator that torch 2.10 lacks."""


def varlen(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    options: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` without bias, soft cap, dropout and sinks."""
    assert mask.window is not None
    rows, heads, length = q_BNTH.shape[:3]
    cu_seqlens_C = mask.cu_seqlens()
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKTH, v_BKTH))
    arguments: dict[str, Any] = {"scale": options.scale, "window_size": mask.window}
    if heads != k.shape[1]:
        arguments["enable_gqa"] = True
    # The row's length as maximum, since the longest document differs from batch to batch.
    out: Tensor = get_operator()(q, k, v, cu_seqlens_C, cu_seqlens_C, length, length, **arguments)
    return out.unflatten(0, (rows, length)).transpose(1, 2)


@constant_when_compiled
def supports_head_dims(width: int, v_width: int, *, grouped: bool) -> bool:
    """Return whether this torch's operator supports head widths. grouped: query heads share key heads."""
    fits = width == v_width and width <= FLASH_MAX_WIDTH and width % 8 == 0
    return (
        fits
        and (not grouped or "enable_gqa" in list_parameters())
        and all(n in list_parameters() for n in REQUIRED_PARAMETERS)
    )


def compute_cu_seqlens(documents_BT: NDArray[Any]) -> NDArray[np.int32]:
    """Return the starts of documents in rows laid end to end, int32 [C + 1], padded with the total length.

    Padding tokens count as one more document of their row. C depends only on the sizes, so that kernels see one shape;
    see `MIN_DOCUMENT_LENGTH`.
    """
    rows, length = documents_BT.shape
    is_start = np.ones((rows, length), bool)
    is_start[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts = np.flatnonzero(is_start)
    tokens, mean_length = rows * length, MIN_DOCUMENT_LENGTH
    while len(starts) > rows + -(-tokens // mean_length):
        mean_length = max(mean_length // 4, 1)
    cu_seqlens = np.full(rows + -(-tokens // mean_length) + 1, tokens, np.int32)
    cu_seqlens[: len(starts)] = starts
    return cu_seqlens


def get_operator() -> Callable[..., Any]:
    """Return torch's operator, imported on use."""
    from torch.nn.attention.varlen import varlen_attn

    result: Callable[..., Any] = varlen_attn
    return result


@cache
def list_parameters() -> frozenset[str]:
    """Return the names of the operator's parameters, which differ between versions of torch; empty without it."""
    try:
        return frozenset(inspect.signature(get_operator()).parameters)
    except (ImportError, AttributeError):
        return frozenset()


def uniform_cu_seqlens(rows: int, length: int, device: torch.device) -> Tensor:
    """Return `cu_seqlens` of rows of one document each, int32 [rows + 1]."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
