"""Attention by torch's fused kernels, through `scaled_dot_product_attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.attention.products import Variant
from megatfm.ops.attention.visible import Visible

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width


def fused(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    seen: Visible,
    bias_BNTS: Tensor | None,
    variant: Variant,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """As `attention_reference`, without soft cap, dropped probabilities and sinks; causal only where T = S."""
    causal, mask = seen.plain == "causal", seen.mask()
    if bias_BNTS is not None:
        mask = _masked_bias(bias_BNTS.to(q_BNTH.dtype), mask, causal)
    return F.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSV,
        attn_mask=mask,
        is_causal=causal and bias_BNTS is None,
        scale=variant.scale,
        enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
    )


def _masked_bias(bias_BNTS: Tensor, mask_B1TS: Tensor | None, causal: bool) -> Tensor:
    if causal:
        mask_B1TS = torch.ones(bias_BNTS.shape[-2:], dtype=torch.bool, device=bias_BNTS.device).tril()
    if mask_B1TS is None:
        return bias_BNTS
    return bias_BNTS.masked_fill(~mask_B1TS, torch.finfo(bias_BNTS.dtype).min)
