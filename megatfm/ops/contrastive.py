"""Contrastive losses of images and captions, computed in chunks of logits over a ring of data ranks.

Images stay on their rank; blocks of captions rotate around the ring, together with the running log-sum-exp of their
logit columns (softmax), and with their gradients in the backward pass. Memory does not grow with the number of ranks:
own features and gradients, one block of captions, one chunk of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# M local images, N local captions, S captions of a block, W width of a feature, C images of a chunk

Kind = Literal["softmax", "sigmoid"]
CHUNK = 1024
"""Number of images whose logits are in memory at once."""


class Ring(Protocol):
    """Interface of a ring of data ranks: each rank sends to the next and receives from the previous one."""

    size: int

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        """Return the number of pairs in the block that this rank holds after 0, 1, … steps. A collective."""

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """Send tensors [n, …] to the next rank; return those [length, …] of the previous rank."""


class OneRank:
    """A ring of one rank."""

    size = 1

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        return [n]

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        return list(tensors)


ONE_RANK = OneRank()


@dataclass(frozen=True)
class LossOptions:
    """Options of the loss. ring: the ranks that share the global batch. chunk: see `CHUNK`."""

    kind: Kind
    ring: Ring = ONE_RANK
    chunk: int = CHUNK


def contrastive_loss(
    images_MW: Tensor, texts_NW: Tensor, scale: Tensor, bias: Tensor | None, options: LossOptions
) -> Tensor:
    """Return this rank's share of the summed loss over all pairs (image i, caption i) of the global batch, a scalar.

    scale, bias [1]: logits are scale · images @ textsᵀ + bias. Softmax: the mean of both directions' cross-entropies
    (Radford et al. 2021, figure 3). Sigmoid: −log σ(± logit) of every pair, negatives summed (Zhai et al. 2023).
    Gradients of features are complete; those of scale and bias are partial and must be summed over ranks.
    """
    loss: Tensor = _ContrastiveLoss.apply(images_MW, texts_NW, scale, bias, options)
    return loss


class _ContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, options: LossOptions
    ) -> Tensor:
        ring, is_softmax = options.ring, options.kind == "softmax"
        lengths = ring.lengths(len(images), images.device)
        rows_M = images.new_full((len(images),), -torch.inf)  # log-sum-exp of the rows, columns_S: of the columns
        block_SW, columns_S, loss = texts, texts.new_full((len(texts),), -torch.inf), images.new_zeros(())
        for step in range(ring.size):
            for begin in range(0, len(images), options.chunk):
                chunk = slice(begin, begin + options.chunk)
                logits_CS = images[chunk] @ block_SW.T * scale
                if is_softmax:
                    rows_M[chunk] = torch.logaddexp(rows_M[chunk], logits_CS.logsumexp(1))
                    columns_S = torch.logaddexp(columns_S, logits_CS.logsumexp(0))
                    pairs_C = logits_CS.diagonal(begin) if step == 0 else logits_CS.new_zeros(())
                    loss = loss - pairs_C.sum()
                else:
                    logits_CS = logits_CS if bias is None else logits_CS + bias
                    loss = loss + F.softplus(logits_CS).sum()
                    if step == 0:  # −log σ(x) = −log σ(−x) − x
                        loss = loss - logits_CS.diagonal(begin).sum()
            if ring.size > 1 and (is_softmax or step < ring.size - 1):
                sent = [block_SW] if step < ring.size - 1 else []
                sent += [columns_S] if is_softmax else []
                received = ring.shift(sent, lengths[(step + 1) % ring.size])
                block_SW = received[0] if step < ring.size - 1 else texts
                columns_S = received[-1] if is_softmax else columns_S
        if is_softmax:
            loss = loss + (rows_M.sum() + columns_S.sum()) / 2
        ctx.save_for_backward(images, texts, scale, bias, rows_M, columns_S)
        ctx.options, ctx.lengths = options, lengths
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        images, block_SW, scale, bias, rows_M, columns_S = ctx.saved_tensors
        options, lengths = ctx.options, ctx.lengths
        ring, is_softmax = options.ring, options.kind == "softmax"
        images_grad, block_grad = torch.zeros_like(images), torch.zeros_like(block_SW)
        scale_grad, bias_grad = torch.zeros_like(scale), None if bias is None else torch.zeros_like(bias)
        for step in range(ring.size):
            for begin in range(0, len(images), options.chunk):
                chunk = slice(begin, begin + options.chunk)
                cosines_CS = images[chunk] @ block_SW.T
                logits_CS = cosines_CS * scale
                if is_softmax:
                    rows_C1 = rows_M[chunk, None]
                    logits_grad = ((logits_CS - rows_C1).exp() + (logits_CS - columns_S).exp()) / 2
                else:
                    logits_grad = (logits_CS if bias is None else logits_CS + bias).sigmoid()
                if step == 0:
                    logits_grad.diagonal(begin).sub_(1)
                images_grad[chunk] += logits_grad @ block_SW * scale
                block_grad = block_grad + logits_grad.T @ images[chunk] * scale
                scale_grad += (logits_grad * cosines_CS).sum()
                if bias_grad is not None:
                    bias_grad += logits_grad.sum()
            if ring.size > 1:
                is_last = step == ring.size - 1
                sent = [block_grad] if is_last else [block_grad, block_SW, *([columns_S] if is_softmax else [])]
                block_grad, *received = ring.shift(sent, lengths[(step + 1) % ring.size])
                if not is_last:
                    block_SW, columns_S = received[0], received[-1] if is_softmax else columns_S
        gradients = images_grad, block_grad, scale_grad, bias_grad
        return *(None if value is None else value * gradient for value in gradients), None


def contrastive_loss_reference(
    images_MW: Tensor, texts_MW: Tensor, scale: Tensor, bias: Tensor | None, kind: Kind
) -> Tensor:
    """Compute `contrastive_loss` on one rank from all logits at once, with autograd."""
    logits_MM = scale * images_MW @ texts_MW.T
    if kind == "softmax":
        indices_M = torch.arange(len(logits_MM), device=logits_MM.device)
        losses = [F.cross_entropy(logits, indices_M, reduction="sum") for logits in (logits_MM, logits_MM.T)]
        return (losses[0] + losses[1]) / 2
    logits_MM = logits_MM if bias is None else logits_MM + bias
    signs_MM = 2 * torch.eye(len(logits_MM), dtype=logits_MM.dtype, device=logits_MM.device) - 1
    return -F.logsigmoid(signs_MM * logits_MM).sum()


@torch.no_grad()
def compute_retrieval_ranks(
    images_MW: Tensor, texts_NW: Tensor, captions_N: Tensor, ring: Ring = ONE_RANK, chunk: int = CHUNK
) -> Tensor:
    """Return for each image the number of other captions of all ranks at least as similar as its own, int64 [M].

    captions_N: int64 ids, equal for equal captions; captions equal to the image's own do not count. A NaN similarity
    counts as higher, so that nothing is right by accident.
    """
    lengths = ring.lengths(len(images_MW), images_MW.device)
    pairs_M, ranks_M = (images_MW * texts_NW).sum(1), torch.zeros_like(captions_N)
    block_SW, captions_S = texts_NW, captions_N
    for step in range(ring.size):
        for begin in range(0, len(images_MW), chunk):
            rows = slice(begin, begin + chunk)
            is_less_CS = images_MW[rows] @ block_SW.T < pairs_M[rows, None]
            is_other_CS = captions_N[rows, None] != captions_S
            ranks_M[rows] += (is_other_CS & ~is_less_CS).sum(1)
        if step < ring.size - 1:
            block_SW, captions_S = ring.shift([block_SW, captions_S], lengths[step + 1])
    return ranks_M
