"""Attention by torch's fused kernels, through `scaled_dot_product_attention`."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions, unless_blind
from megatfm.ops.attention.relative_bias import expand
from megatfm.ops.log_once import constant_when_compiled

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width

log = logging.getLogger("megatfm")

LONG = 1024
"""Number of queries on a CPU from which on heads of two widths are padded to one."""

FLASH_WIDEST = 256
"""Channels of the widest heads that FlashAttention takes."""

PLAIN = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
MASKED = [SDPBackend.EFFICIENT_ATTENTION]
"""FlashAttention takes no mask, and cuDNN's backward pass under one gives NaN on Hopper GPUs (pytorch issue 196678)."""


def fused(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    variant: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` without soft cap, dropped probabilities and sinks; causal only where T = S."""
    causal, mask_tensor = mask.builtin_mask == "causal", mask.mask()
    masked_by_bias = None if bias is None else mask_tensor
    if bias is not None:
        mask_tensor = _masked_bias(expand(bias.to(q_BNTH.dtype), k_BKSH.shape[2]), mask_tensor, causal)
    groups = q_BNTH.shape[1] // k_BKSH.shape[1]
    allowed = backends(q_BNTH, v_BKSV.shape[-1], masked=mask_tensor is not None)
    if allowed and groups > 1 and not _by_flash(q_BNTH, v_BKSV.shape[-1], masked=mask_tensor is not None):
        # Only FlashAttention takes keys that heads share; torch would find no other of these kernels.
        k_BKSH, v_BKSV = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSV))
    width, v_width = q_BNTH.shape[-1], v_BKSV.shape[-1]
    scale = width**-0.5 if variant.scale is None else variant.scale
    if q_BNTH.device.type == "cpu" and width != v_width and q_BNTH.shape[2] >= LONG:
        # The fused kernel of a CPU takes heads of one width; torch would hold all scores at once instead.
        widest = max(width, v_width)
        q_BNTH, k_BKSH = (F.pad(x, (0, widest - width)) for x in (q_BNTH, k_BKSH))
        v_BKSV = F.pad(v_BKSV, (0, widest - v_width))
    with _only(allowed):
        out_BNTV = F.scaled_dot_product_attention(
            q_BNTH,
            k_BKSH,
            v_BKSV,
            attn_mask=mask_tensor,
            is_causal=causal and bias is None,
            scale=scale,
            enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
        )
    # Under a mask of booleans torch gives 0 by itself, under one of numbers the mean of all values.
    return unless_blind(out_BNTV[..., :v_width], masked_by_bias)


def backends(q_BNTH: Tensor, v_width: int, *, masked: bool) -> list[SDPBackend]:
    """The kernels of a GPU that may serve; none: torch takes what it likes, since they don't compute in this type, or
    with heads of these widths, which is logged."""
    if q_BNTH.device.type != "cuda":
        return []
    widths = q_BNTH.shape[-1], v_width
    if q_BNTH.dtype == torch.float64 or any(width % 8 for width in widths):
        log_once(str(q_BNTH.dtype)[6:], *widths)
        return []
    return MASKED if masked else PLAIN


def _by_flash(q_BNTH: Tensor, v_width: int, *, masked: bool) -> bool:
    """Whether FlashAttention serves it on a GPU."""
    width, is_half = q_BNTH.shape[-1], q_BNTH.dtype in (torch.bfloat16, torch.float16)
    return not masked and is_half and width == v_width <= FLASH_WIDEST


def _only(allowed: list[SDPBackend]) -> AbstractContextManager[None]:
    return sdpa_kernel(allowed) if allowed else nullcontext()


@constant_when_compiled
def log_once(dtype: str, k_width: int, v_width: int) -> None:
    """Warn, once for each kind of heads, that no fused kernel takes them."""
    kind = dtype, k_width, v_width
    if kind not in _LOGGED:
        _LOGGED.add(kind)
        log.warning(
            "attention in %s with heads of %d channels (values: %d): no fused kernel of a GPU takes that, so all "
            "scores are held at once; take bf16, and heads of a multiple of 8",
            dtype, k_width, v_width,
        )  # fmt: skip


_LOGGED: set[tuple[str, int, int]] = set()


def _masked_bias(bias_BNTS: Tensor, mask_B1TS: Tensor | None, causal: bool) -> Tensor:
    if causal:
        mask_B1TS = torch.ones(bias_BNTS.shape[-2:], dtype=torch.bool, device=bias_BNTS.device).tril()
    if mask_B1TS is None:
        return bias_BNTS
    return bias_BNTS.masked_fill(~mask_B1TS, torch.finfo(bias_BNTS.dtype).min)
