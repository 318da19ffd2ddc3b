"""Cross-entropy over a vocabulary as a sum, so that a global mean is taken once, over the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.torch_private import is_fake, keeps_graph

IGNORE = -100
"""A target that does not count."""

LOGITS_BYTES = 2**30
"""On a GPU, of the logits that are held at once: a gigabyte."""

ROW_ALIGNMENT = 64
"""Rows of logits begin at multiples of this many elements."""

AT_ONCE = 2**20
"""On a CPU, logits that are made into gradients together, which its caches hold (docs/LOG.md, 2026-11-22)."""

# M tokens of all rows, D model width, V vocabulary, W the rows of it that are held here

AllGather = Callable[[Tensor], Tensor]
"""Takes a tensor [...] of one part of the vocabulary to those of all parts [P, ...]."""


@dataclass(frozen=True)
class LogitOptions:
    """softcap: logits l become c·tanh(l/c). smoothing: share of a target that is spread over the vocabulary."""

    softcap: float | None = None
    smoothing: float = 0.0


def cross_entropy_reference(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    bias_V: Tensor | None = None,
    variant: LogitOptions = LogitOptions(),
) -> Tensor:
    """Σ −log softmax(h Wᵀ + b)[target] over the tokens whose target counts, in nats; all logits at once."""
    logits_MV = F.linear(hidden_MD, weight_VD, bias_V).to(_precise(hidden_MD))
    if variant.softcap:
        logits_MV = variant.softcap * torch.tanh(logits_MV / variant.softcap)
    return F.cross_entropy(
        logits_MV, targets_M, ignore_index=IGNORE, reduction="sum", label_smoothing=variant.smoothing
    )


def cross_entropy(
    hidden_MD: Tensor,
    weight_WD: Tensor,
    targets_M: Tensor,
    bias_W: Tensor | None = None,
    variant: LogitOptions = LogitOptions(),
    *,
    chunk: int | None = None,
    vocab_start: int = 0,
    all_gather: AllGather | None = None,
    losses_M: Tensor | None = None,
    weights_M: Tensor | None = None,
) -> Tensor:
    """Cross-entropy in chunks of tokens, so that tokens × vocabulary logits never exist at once.

    The gradients that are wanted are made in the forward pass, where the logits were (as in Liger, Hsu et al. 2024),
    and only scaled in the backward pass. chunk: tokens; None: as memory allows. For a vocabulary in parts, `weight_WD`
    holds the rows from `first` on and `join` brings the parts together: every part then gives the whole loss, and its
    own share of the gradient to `hidden`. losses_M: is filled with the tokens' losses, 0 for those that don't count.
    weights_M: factors on the tokens' losses in the sum, which have no gradients.
    """
    chunk = chunk or default_chunk(hidden_MD, len(weight_WD))
    # A function knows of a parameter that it requires gradients, and not whether any are wanted.
    needs_grad = tuple(
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden_MD, weight_WD, bias_W)
    )
    return _ChunkedCrossEntropy.apply(
        hidden_MD, weight_WD, bias_W, targets_M, variant, chunk, vocab_start, all_gather, needs_grad, losses_M,
        weights_M,
    )  # fmt: skip


def default_chunk(hidden_MD: Tensor, rows: int) -> int:
    """Number of tokens whose logits over so many rows of the vocabulary are held at once. Each chunk passes over the
    gradient of the weights, so few large ones cost less; on a CPU 1,024 tokens are enough for that not to matter."""
    if hidden_MD.device.type == "cpu":
        return 1024
    chunk = LOGITS_BYTES // (padded(rows) * hidden_MD.element_size())
    return max(chunk // ROW_ALIGNMENT * ROW_ALIGNMENT, ROW_ALIGNMENT)


def padded(rows: int) -> int:
    """Logits of a token in memory, so that each row begins where tensor cores like it."""
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        targets_M: Tensor,
        variant: LogitOptions,
        chunk: int,
        vocab_start: int,
        all_gather: AllGather | None,
        needs_grad: tuple[bool, bool, bool],
        losses_M: Tensor | None,
        weights_M: Tensor | None,
    ) -> Tensor:
        if weights_M is not None and losses_M is None:
            losses_M = torch.empty_like(weights_M)
        precise, vocabulary = _precise(hidden_MD), len(weight_WD)
        buffer = hidden_MD.new_empty(min(chunk, len(hidden_MD)), padded(vocabulary))
        # oneDNN's bf16 products with AMX read on in a row beyond its end, and multiply by zero what is there.
        buffer[:, vocabulary:] = 0
        total = hidden_MD.new_zeros((), dtype=precise)
        needs_hidden_grad, needs_weight_grad, needs_bias_grad = needs_grad
        hidden_gradient = torch.empty_like(hidden_MD) if needs_hidden_grad else None
        weight_gradient = None
        bias_gradient = (
            torch.zeros_like(bias_W, dtype=precise) if bias_W is not None and needs_bias_grad else None
        )
        for start in range(0, hidden_MD.shape[0], chunk):
            part = slice(start, start + chunk)
            hidden = hidden_MD[part]
            logits = _logits(hidden, weight_WD, bias_W, buffer[: len(hidden), :vocabulary])
            losses = None if losses_M is None else losses_M[part]
            sum_of_chunk = _to_gradient(logits, targets_M[part], variant, vocab_start, all_gather, losses)
            gradient = logits
            if weights_M is not None and losses is not None:
                sum_of_chunk = (weights_M[part] * losses).sum()
                gradient *= weights_M[part, None].to(gradient.dtype)
            total += sum_of_chunk
            if hidden_gradient is not None:
                hidden_gradient[part] = gradient @ weight_WD
            if needs_weight_grad:
                weight_gradient = _add_product(weight_gradient, gradient.T, hidden)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=precise)
        if needs_weight_grad and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight_WD)
        ctx.save_for_backward(
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight_WD.dtype),
            None if bias_gradient is None or bias_W is None else bias_gradient.to(bias_W.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # One factor for the whole sum: scaling afterwards is exact up to rounding. Where they lie, unless they are kept
        # for another backward pass: on a CPU, memory for as much again costs more than the product.
        is_graph_kept = keeps_graph()
        scaled = (
            None
            if saved is None
            else torch.mul(saved, gradient.to(saved.dtype), out=None if is_graph_kept else saved)
            for saved in ctx.saved_tensors
        )
        return *scaled, None, None, None, None, None, None, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, summed in float32 or better, in one pass over the total where dtypes allow.

    A product of bfloat16 is rounded to bfloat16 before it is added, and the first is kept as it is.
    """
    if total is None:
        return left @ right
    if total.dtype == right.dtype == _precise(right):
        return total.addmm_(left, right)
    return total.to(_precise(right)).add_(left @ right)


def _logits(hidden: Tensor, weight_WD: Tensor, bias_W: Tensor | None, out: Tensor) -> Tensor:
    """They are in the hidden vectors' dtype, as a product leaves them."""
    if bias_W is None:
        return torch.mm(hidden, weight_WD.T, out=out)
    return torch.addmm(bias_W, hidden, weight_WD.T, out=out)


def _to_gradient(
    logits: Tensor,
    targets_M: Tensor,
    variant: LogitOptions,
    vocab_start: int,
    all_gather: AllGather | None,
    losses_M: Tensor | None,
) -> Tensor:
    """Loss of a chunk; the logits [M, W] become its gradient. On a GPU by one kernel; on a CPU by a few rows at a time,
    so that intermediate results stay in its cache. Parts of a vocabulary are joined once a chunk."""
    if all_gather is None and (in_place := _kernel(logits)):
        losses = in_place(
            logits, targets_M, ignore=IGNORE, softcap=variant.softcap, smoothing=variant.smoothing
        )
        if losses_M is not None:
            losses_M.copy_(losses)
        return losses.sum()
    all_at_once = all_gather is not None or logits.device.type != "cpu"
    step = len(logits) if all_at_once else max(1, AT_ONCE // logits.shape[1])
    sums = []
    for start in range(0, len(logits), step):
        rows, targets = logits[start : start + step], targets_M[start : start + step]
        values = rows.to(_precise(rows))
        losses_M1, gradient = _chunk(
            values, targets[:, None], variant, vocab_start, all_gather or _single_shard
        )
        if gradient is not rows:
            rows.copy_(gradient)
        if losses_M is not None:
            losses_M[start : start + step] = losses_M1[:, 0]
        sums.append(losses_M1.sum())
    return torch.stack(sums).sum()


def _single_shard(values: Tensor) -> Tensor:
    return values[None]


def _kernel(logits: Tensor) -> Callable[..., Tensor] | None:
    """Triton's, where there are a GPU and Triton."""
    if logits.device.type == "cuda" and is_fake(logits):
        return _losses_by_shape
    if logits.device.type != "cuda" or logits.dtype == torch.float64 or not has_triton():
        return None
    from megatfm.ops.cross_entropy_triton import to_gradients

    return to_gradients


def _losses_by_shape(logits: Tensor, targets_M: Tensor, **_: Any) -> Tensor:
    """Replace Triton's kernel, which writes gradients in place, for tensors with shapes only."""
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


@cache
def has_triton() -> bool:
    """Whether it is installed, as it is with torch's builds for GPUs."""
    return find_spec("triton") is not None


def _chunk(
    logits: Tensor, targets_M1: Tensor, variant: LogitOptions, vocab_start: int, all_gather: AllGather
) -> tuple[Tensor, Tensor]:
    """Losses [M, 1] of a chunk, and the gradient of their sum with respect to the logits [M, W], which are
    overwritten."""
    has_target = targets_M1 != IGNORE
    local = targets_M1 - vocab_start
    is_local = (local >= 0) & (local < logits.shape[1])
    local = local.where(is_local, 0)
    slope = None
    if variant.softcap:
        logits = torch.tanh(logits / variant.softcap)
        slope = 1 - logits.square()
        logits *= variant.softcap
    largest = logits.amax(1, keepdim=True)
    logits -= largest
    local_statistics = [largest, logits.gather(1, local) * is_local, is_local.to(logits.dtype)]
    if variant.smoothing:
        local_statistics += [logits.sum(1, keepdim=True), torch.full_like(largest, logits.shape[1])]
    exponentials = logits.exp_()
    # Each part has taken off its own largest logit, so one message holds all that the parts exchange.
    largest_P, target_P, held_P, *rest_P, sums_P = all_gather(
        torch.stack([*local_statistics, exponentials.sum(1, keepdim=True)])
    ).unbind(1)
    top = largest_P.amax(0)
    below_P = largest_P - top
    normaliser = (below_P.exp() * sums_P).sum(0)
    target_logit, target_count = (target_P + held_P * below_P).sum(0), held_P.sum(0)
    spread: Tensor | float = 0.0
    if variant.smoothing:
        logits_P, rows_P = rest_P
        sum_of_logits, vocabulary = (logits_P + rows_P * below_P).sum(0), rows_P.sum(0)
        spread = variant.smoothing / vocabulary
        target_logit = (1 - variant.smoothing) * target_logit + spread * sum_of_logits
    # A target beyond the vocabulary is found in no part: not a number, rather than a wrong one.
    losses = (normaliser.log() - target_logit).where(target_count > 0, torch.nan)
    gradient = exponentials.mul_(has_target * (largest - top).exp() / normaliser)
    if variant.smoothing:
        gradient -= spread * has_target
    gradient.scatter_add_(1, local, (variant.smoothing - 1) * (is_local & has_target).to(gradient.dtype))
    if slope is not None:
        gradient *= slope
    return losses.where(has_target, 0), gradient


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def shifted_targets(targets_BT: Tensor, documents_BT: Tensor | None, n: int) -> Tensor:
    """The targets `n` tokens further on in the same document, −100 where there is none, [B, T]."""
    shifted = torch.full_like(targets_BT, IGNORE)
    shifted[:, :-n] = targets_BT[:, n:]
    if documents_BT is not None:
        shifted[:, :-n][documents_BT[:, n:] != documents_BT[:, :-n]] = IGNORE
    return shifted
