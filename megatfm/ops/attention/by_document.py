"""Attention with dropout in packed rows on a CPU, document by document: no scores of pairs in two documents, and what a
document needs fits the processor's caches.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatfm.ops.attention.mask import AttentionMask, DocumentSpans
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.keyed_random import RATE_STEPS, draw_keep_mask

# B batch, N query heads, K key-value heads, T tokens of a row, H head width, V value width, L tokens of a document

SCORES_OF_OVERHEAD = 10_000
"""Scores that take as long as the operators of one more document start (docs/LOG.md, 2026-11-27)."""


def attend_by_document(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTV: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    options: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` with dropout, without bias, soft cap and sinks; by itself where that is faster."""
    assert rng_keys_BNT is not None
    documents = mask.document_spans()
    if documents is None or not is_faster(documents, *q_BNTH.shape[:3]):
        return attention_reference(q_BNTH, k_BKTH, v_BKTV, mask, bias, options, rng_keys_BNT, sinks_N)
    if (groups := q_BNTH.shape[1] // k_BKTH.shape[1]) > 1:
        k_BKTH, v_BKTV = (x.repeat_interleave(groups, dim=1) for x in (k_BKTH, v_BKTV))
    inputs = (q_BNTH * options.compute_scale(q_BNTH.shape[-1]), k_BKTH, v_BKTV, rng_keys_BNT)
    heads_BNTV: Tensor = _AttentionByDocument.apply(*inputs, documents, options.dropout_threshold)
    return heads_BNTV


def is_faster(documents: DocumentSpans, rows: int, heads: int, length: int) -> bool:
    """Return whether single documents take less time than all pairs of the rows."""
    n_pairs = sum((end - start) ** 2 for _, start, end in documents.spans)
    return heads * n_pairs + SCORES_OF_OVERHEAD * len(documents.spans) < heads * rows * length**2


class _AttentionByDocument(torch.autograd.Function):
    """Attention of scaled queries within documents; the backward pass has each document's probabilities."""

    @staticmethod
    def forward(
        ctx: Any, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTV: Tensor, rng_keys_BNT: Tensor, documents: DocumentSpans,
        threshold: int,
    ) -> Tensor:  # fmt: skip
        ctx.documents, ctx.kept_scale = documents, RATE_STEPS / (RATE_STEPS - threshold)
        heads_BNTV, saved = _empty_like(v_BNTV), []
        for row, start, end in documents.spans:
            document = (row, slice(None), slice(start, end))
            scores_NLL = q_BNTH[document] @ k_BNTH[document].mT
            if documents.causal:
                is_later_LL = torch.ones_like(scores_NLL[0], dtype=torch.bool).triu(1)
                scores_NLL.masked_fill_(is_later_LL, -torch.inf)
            probabilities_NLL = scores_NLL.softmax(-1)
            is_kept_NLL = draw_keep_mask(rng_keys_BNT[document], end - start, threshold, start)
            heads_BNTV[document] = (probabilities_NLL * is_kept_NLL @ v_BNTV[document]).mul_(ctx.kept_scale)
            saved += [probabilities_NLL, is_kept_NLL]
        ctx.save_for_backward(q_BNTH, k_BNTH, v_BNTV, heads_BNTV, *saved)
        return heads_BNTV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNTV: Tensor) -> tuple[Tensor | None, ...]:
        q_BNTH, k_BNTH, v_BNTV, heads_BNTV, *saved = ctx.saved_tensors
        grads = [_empty_like(x) for x in (q_BNTH, k_BNTH, v_BNTV)]
        # The probabilities' gradients, weighted by them, sum to this (Dao et al. 2022, appendix B.4).
        sums_BNT1 = (grad_BNTV * heads_BNTV).sum(-1, keepdim=True)
        for index, (row, start, end) in enumerate(ctx.documents.spans):
            document = (row, slice(None), slice(start, end))
            probabilities_NLL, is_kept_NLL = saved[2 * index : 2 * index + 2]
            grad_NLV = grad_BNTV[document] * ctx.kept_scale
            grad_scores_NLL = (grad_NLV @ v_BNTV[document].mT).mul_(is_kept_NLL)
            grad_scores_NLL.sub_(sums_BNT1[document]).mul_(probabilities_NLL)
            grads[0][document] = grad_scores_NLL @ k_BNTH[document]
            grads[1][document] = grad_scores_NLL.mT @ q_BNTH[document]
            grads[2][document] = (probabilities_NLL * is_kept_NLL).mT @ grad_NLV
        return *grads, None, None, None


def _empty_like(x_BNTH: Tensor) -> Tensor:
    """Return an uninitialised [B, N, T, H] that is a view of [B, T, N, H], as the projections around attention have."""
    rows, heads, length, width = x_BNTH.shape
    return x_BNTH.new_empty(rows, length, heads, width).transpose(1, 2)
