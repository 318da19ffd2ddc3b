"""Attention written out in matmuls (Vaswani et al. 2017; Ainslie et al. 2023): the reference, all at once, in chunks of
queries, and document by document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatfm.ops.attention.mask import FULL_MASK, AttentionMask, DocumentSpans, expand_bias
from megatfm.ops.keyed_random import RATE_STEPS, draw_keep_mask, dropout
from megatfm.ops.torch_private import constant_when_compiled
from megatfm.terminal import log_once

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width, L tokens of a document

MAX_SCORES = 2**26
"""Number of scores held at once; if there are more, the backward pass recomputes them in chunks."""

SCORES_OF_OVERHEAD = 10_000
"""Scores that take as long as the operators of one more document start (docs/LOG.md, 2026-11-27)."""


@dataclass(frozen=True)
class AttentionOptions:
    """Options of attention.

    scale: of the scores; None: H^−1/2. softcap: scores s become c·tanh(s/c). dropout: rate of dropped probabilities,
    which needs random keys int64 [B, N, T].
    """

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def compute_scale(self, width: int) -> float:
        """Return the factor on the scores of heads of `width` channels."""
        return width**-0.5 if self.scale is None else self.scale

    @property
    def dropout_threshold(self) -> int:
        """Number of dropped probabilities of 65,536 (`megatfm.ops.keyed_random`)."""
        return round(self.dropout * RATE_STEPS)


def attention_reference(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask: AttentionMask = FULL_MASK,
    bias: Tensor | None = None,
    options: AttentionOptions = AttentionOptions(),
    rng_keys_BNT: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias) v over visible keys, [B, N, T, V]; 0 for a query that sees no key.

    bias: broadcasts to [B, N, T, S], or is relative (`megatfm.ops.attention.mask`); added after the soft cap.
    sinks_N: a score for each head that takes part in the softmax without a key (Agarwal et al. 2025, gpt-oss).
    """
    if (groups := q_BNTH.shape[1] // k_BKSH.shape[1]) > 1:
        k_BKSH, v_BKSV = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSV))
    # Scaling the queries costs less than scaling the scores.
    scores_BNTS = (q_BNTH * options.compute_scale(q_BNTH.shape[-1])) @ k_BKSH.transpose(-1, -2)
    if options.softcap:
        scores_BNTS = options.softcap * torch.tanh(scores_BNTS / options.softcap)
    if bias is not None:
        scores_BNTS = scores_BNTS + expand_bias(bias.to(scores_BNTS.dtype), k_BKSH.shape[2])
    mask_B1TS = mask.mask()
    if mask.builtin_mask == "causal":
        queries, keys = scores_BNTS.shape[-2:]
        mask_B1TS = torch.ones(queries, keys, dtype=torch.bool, device=q_BNTH.device).tril(keys - queries)
    probabilities_BNTS = compute_probabilities(scores_BNTS, mask_B1TS, options.dropout, rng_keys_BNT, sinks_N)
    return zero_blind_queries(probabilities_BNTS @ v_BKSV, mask_B1TS, mask)


def compute_probabilities(
    scores_BNTS: Tensor,
    mask_B1TS: Tensor | None,
    rate: float = 0.0,
    rng_keys_BNT: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the softmax of scores under a mask, with dropout if there are random keys; may overwrite the scores.

    A query that sees no key has equal probabilities for all keys: pass the output through `zero_blind_queries`.
    """
    if mask_B1TS is not None:
        # The lowest finite number, not −∞, so that queries that see no key, such as padding, don't become NaN.
        lowest = torch.finfo(scores_BNTS.dtype).min
        if scores_BNTS.dtype == torch.float16:  # where lowest + score would be −∞
            scores_BNTS = scores_BNTS.masked_fill_(~mask_B1TS, lowest)
        else:  # adding costs half of filling, and nothing in the backward pass (docs/LOG.md, 2026-11-22)
            mask_bias_B1TS = torch.full_like(mask_B1TS, lowest, dtype=scores_BNTS.dtype)
            scores_BNTS = scores_BNTS.add_(mask_bias_B1TS.masked_fill_(mask_B1TS, 0))
    if sinks_N is None:
        probabilities_BNTS = scores_BNTS.softmax(-1)
    else:
        sinks_BNT1 = sinks_N.to(scores_BNTS.dtype)[:, None, None].expand(*scores_BNTS.shape[:3], 1)
        probabilities_BNTS = torch.cat([scores_BNTS, sinks_BNT1], -1).softmax(-1)[..., :-1]
    return probabilities_BNTS if rng_keys_BNT is None else dropout(probabilities_BNTS, rate, rng_keys_BNT)


def zero_blind_queries(heads_BNTV: Tensor, mask_B1TS: Tensor | None, mask: AttentionMask = FULL_MASK) -> Tensor:
    """Set the output of queries that see no key to 0, which also stops their gradients.

    mask: the one that `mask_B1TS` belongs to; layers with the same mask share which queries these are.
    """
    if mask_B1TS is None:
        return heads_BNTV
    is_blind_B1T1 = mask.cached("blind", lambda: ~mask_B1TS.any(-1, keepdim=True))
    return heads_BNTV.masked_fill(is_blind_B1T1, 0)


def attend_in_chunks(attend: Callable[[slice], Tensor], q_BNTH: Tensor, keys: int, kind: str) -> Tensor:
    """Return attention's output [B, N, T, V], in chunks of queries if there are many scores.

    attend: slice of queries → their output. keys: number per row. kind: name for the log.
    """
    queries = q_BNTH.shape[2]
    chunk_size = max(1, MAX_SCORES // max(1, q_BNTH.shape[:2].numel() * keys))
    is_single = chunk_size >= queries or torch.compiler.is_compiling()
    _log_chunking(kind, is_single, q_BNTH.device.type, q_BNTH.dtype)
    if is_single:
        return attend(slice(0, queries))
    chunks = [slice(start, min(start + chunk_size, queries)) for start in range(0, queries, chunk_size)]
    if not torch.is_grad_enabled():
        return torch.cat([attend(chunk) for chunk in chunks], 2)
    outputs = [checkpoint(attend, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(outputs, 2)


@constant_when_compiled
def _log_chunking(kind: str, is_single: bool, device: str, dtype: torch.dtype) -> None:
    chunks = "all queries at once" if is_single else "some queries at a time, and again in the backward pass"
    log_once(f"attention {kind} on {device} in {str(dtype)[6:]} runs in kernel products, {chunks}")


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
    """Compute `attention_reference` on a CPU with dropout, without bias, soft cap and sinks.

    Document by document where that is faster: no scores of pairs in two documents are computed, and what a document
    needs fits the processor's caches.
    """
    assert rng_keys_BNT is not None
    documents = mask.document_spans()
    if documents is None or not is_faster_by_document(documents, *q_BNTH.shape[:3]):
        return attention_reference(q_BNTH, k_BKTH, v_BKTV, mask, bias, options, rng_keys_BNT, sinks_N)
    if (groups := q_BNTH.shape[1] // k_BKTH.shape[1]) > 1:
        k_BKTH, v_BKTV = (x.repeat_interleave(groups, dim=1) for x in (k_BKTH, v_BKTV))
    inputs = (q_BNTH * options.compute_scale(q_BNTH.shape[-1]), k_BKTH, v_BKTV, rng_keys_BNT)
    heads_BNTV: Tensor = _AttentionByDocument.apply(*inputs, documents, options.dropout_threshold)
    return heads_BNTV


def is_faster_by_document(documents: DocumentSpans, rows: int, heads: int, length: int) -> bool:
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
