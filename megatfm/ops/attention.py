"""Scaled dot-product attention with grouped key and value heads (Vaswani et al. 2017; Ainslie et al. 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, N query heads, K key-value heads, T queries, S keys, H head width


def causal_attention_reference(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_B1TS: Tensor | None = None
) -> Tensor:
    """Attention written out: softmax(q kᵀ / √H) v under a causal or given mask, [B, N, T, H]."""
    if (groups := q_BNTH.shape[1] // k_BKSH.shape[1]) > 1:
        k_BKSH, v_BKSH = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSH))
    # Scaling the queries costs less than scaling the scores.
    scores_BNTS = (q_BNTH * q_BNTH.shape[-1] ** -0.5) @ k_BKSH.transpose(-1, -2)
    if mask_B1TS is None:
        mask_B1TS = torch.ones(scores_BNTS.shape[-2:], dtype=torch.bool, device=q_BNTH.device).tril()
    return scores_BNTS.masked_fill_(~mask_B1TS, -torch.inf).softmax(-1) @ v_BKSH


MATMUL_SCORES = 2**26
"""On a CPU in bfloat16, up to this many scores at once the written-out form is used: its matrix products run on
oneDNN's bfloat16 kernels, 1.5 to 3 times as fast as the fused kernel (docs/LOG.md, 2026-11-21)."""


def causal_attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_B1TS: Tensor | None = None
) -> Tensor:
    """The same by the fastest way there is for the device; without a mask, query t sees keys up to t."""
    scores = q_BNTH.shape[:3].numel() * k_BKSH.shape[2]
    if q_BNTH.device.type == "cpu" and q_BNTH.dtype == torch.bfloat16 and scores <= MATMUL_SCORES:
        return causal_attention_reference(q_BNTH, k_BKSH, v_BKSH, mask_B1TS)
    return F.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        attn_mask=mask_B1TS,
        is_causal=mask_B1TS is None,
        enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
    )
