"""Scaled dot-product attention with grouped key and value heads (Vaswani et al. 2017; Ainslie et al. 2023)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.dropout import dropout

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width

MATMUL_SCORES = 2**26
"""On a CPU in bfloat16, up to this many scores at once the written-out form is used: its matrix products run on
oneDNN's bfloat16 kernels, 1.5 to 3 times as fast as the fused kernel (docs/LOG.md, 2026-11-21)."""


@dataclass(frozen=True)
class Variant:
    """What may differ from plain attention.

    causal: without a mask, query t of T sees keys up to t + S − T. scale: of the scores; None: H^−1/2. softcap:
    scores s become c·tanh(s/c). dropout: rate of dropped probabilities, which needs keys int64 [B, N, T].
    """

    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0


def attention_reference(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask_B1TS: Tensor | None = None,
    bias_BNTS: Tensor | None = None,
    variant: Variant = Variant(),
    keys_BNT: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v under a mask (true: may look), written out; [B, N, T, V].

    bias broadcasts to [B, N, T, S]; it is added after the soft cap. A query that sees no key gets the mean of v.
    """
    if (groups := q_BNTH.shape[1] // k_BKSH.shape[1]) > 1:
        k_BKSH, v_BKSV = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSV))
    scale = q_BNTH.shape[-1] ** -0.5 if variant.scale is None else variant.scale
    # Scaling the queries costs less than scaling the scores.
    scores_BNTS = (q_BNTH * scale) @ k_BKSH.transpose(-1, -2)
    if variant.softcap:
        scores_BNTS = variant.softcap * torch.tanh(scores_BNTS / variant.softcap)
    if bias_BNTS is not None:
        scores_BNTS = scores_BNTS + bias_BNTS.to(scores_BNTS.dtype)
    if mask_B1TS is None and variant.causal:
        queries, seen = scores_BNTS.shape[-2:]
        mask_B1TS = torch.ones(queries, seen, dtype=torch.bool, device=q_BNTH.device).tril(seen - queries)
    return probabilities(scores_BNTS, mask_B1TS, variant.dropout, keys_BNT) @ v_BKSV


def probabilities(
    scores_BNTS: Tensor, mask_B1TS: Tensor | None, rate: float = 0.0, keys_BNT: Tensor | None = None
) -> Tensor:
    """softmax of scores under a mask, dropped at `rate` where there are keys; the scores may be overwritten."""
    if mask_B1TS is not None:
        # The lowest number and not −∞: a row that sees nothing, as padding may, must not turn into NaN.
        scores_BNTS = scores_BNTS.masked_fill_(~mask_B1TS, torch.finfo(scores_BNTS.dtype).min)
    probabilities_BNTS = scores_BNTS.softmax(-1)
    return probabilities_BNTS if keys_BNT is None else dropout(probabilities_BNTS, rate, keys_BNT)


def attention(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask_B1TS: Tensor | None = None,
    bias_BNTS: Tensor | None = None,
    variant: Variant = Variant(),
    keys_BNT: Tensor | None = None,
) -> Tensor:
    """The same by the fastest way there is for the device and the variant."""
    drops = variant.dropout > 0 and keys_BNT is not None
    scores = q_BNTH.shape[:3].numel() * k_BKSH.shape[2]
    matmul = q_BNTH.device.type == "cpu" and q_BNTH.dtype == torch.bfloat16 and scores <= MATMUL_SCORES
    square = q_BNTH.shape[2] == k_BKSH.shape[2]
    # No fused kernel has a soft cap, our dropout, or a causal order that ends at the last key.
    if drops or variant.softcap or matmul or (variant.causal and mask_B1TS is None and not square):
        return attention_reference(q_BNTH, k_BKSH, v_BKSV, mask_B1TS, bias_BNTS, variant, keys_BNT)
    causal = variant.causal and mask_B1TS is None
    if bias_BNTS is not None:
        mask_B1TS = _masked_bias(bias_BNTS.to(q_BNTH.dtype), mask_B1TS, causal)
    return F.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSV,
        attn_mask=mask_B1TS,
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
