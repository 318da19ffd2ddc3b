"""Contrastive losses of images and captions, in chunks of logits, where captions may pass from rank to rank.

Images stay and captions travel: with each block of captions goes what is known of its columns (for softmax the
logarithm of their sums), in the backward pass their gradient. So a rank holds its own features, their gradients, one
block of another rank's and one chunk of logits, however many ranks there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# M images here, N captions here, S captions of a block, W width of a feature, C images of a chunk

Kind = Literal["softmax", "sigmoid"]
CHUNK = 1024
"""Images whose logits with a block of captions are in memory at once."""


class Ring(Protocol):
    """The ranks among which a global batch lies, each of which sends to the next and receives from the one before."""

    size: int

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        """Return how many pairs the block has that is here after 0, 1, … steps. A collective."""

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """Send tensors [n, …] to the next rank; returns those [length, …] of the rank before."""


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
    """kind: of the loss. ring: the ranks that hold the batch. chunk: see `CHUNK`."""

    kind: Kind
    ring: Ring = ONE_RANK
    chunk: int = CHUNK


class _Sums(NamedTuple):
    """A rank's part of the loss, and for softmax the logarithms of sums over rows [M] and columns [N]."""

    loss: Tensor
    rows_M: Tensor
    columns_N: Tensor


def contrastive_loss(
    images_MW: Tensor, texts_NW: Tensor, scale: Tensor, bias: Tensor | None, options: LossOptions
) -> Tensor:
    """Return this rank's part of the summed loss over all pairs (image i, caption i) of the global batch, a scalar.

    scale, bias [1]: logits are scale · images @ textsᵀ + bias. Softmax: the mean of both directions' cross-entropies
    (Radford et al. 2021, figure 3). Sigmoid: −log σ(± logit) of every pair, negatives summed (Zhai et al. 2023).
    Gradients of features are complete; those of scale and bias are this rank's part, to be summed over ranks.
    """
    loss: Tensor = _ContrastiveLoss.apply(images_MW, texts_NW, scale, bias, options)
    return loss


class _ContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, options: LossOptions
    ) -> Tensor:
        lengths = options.ring.lengths(len(images), images.device)
        sums = _forward(images, texts, scale, bias, options, lengths)
        ctx.save_for_backward(images, texts, scale, bias, sums.rows_M, sums.columns_N)
        ctx.options, ctx.lengths = options, lengths
        return sums.loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        images, texts, scale, bias, rows, columns = ctx.saved_tensors
        sums = _Sums(gradient, rows, columns)
        parts = _backward(images, texts, scale, bias, sums, ctx.options, ctx.lengths)
        return *(None if part is None else part * gradient for part in parts), None


def _forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    lengths: Sequence[int],
) -> _Sums:
    ring, is_softmax = options.ring, options.kind == "softmax"
    rows_M = images.new_full((len(images),), -torch.inf)
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
            length = lengths[(step + 1) % ring.size]
            travelling = [block_SW] if step < ring.size - 1 else []
            travelling += [columns_S] if is_softmax else []
            received = ring.shift(travelling, length)
            block_SW = received[0] if step < ring.size - 1 else texts
            columns_S = received[-1] if is_softmax else columns_S
    if is_softmax:
        loss = loss + (rows_M.sum() + columns_S.sum()) / 2
    return _Sums(loss, rows_M, columns_S)


def _backward(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, sums: _Sums, options: LossOptions,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return gradients of images, texts, scale and bias."""
    ring, is_softmax = options.ring, options.kind == "softmax"
    of_images, of_block = torch.zeros_like(images), torch.zeros_like(texts)
    of_scale, of_bias = torch.zeros_like(scale), None if bias is None else torch.zeros_like(bias)
    block_SW, columns_S = texts, sums.columns_N
    for step in range(ring.size):
        for begin in range(0, len(images), options.chunk):
            chunk = slice(begin, begin + options.chunk)
            cosines_CS = images[chunk] @ block_SW.T
            logits_CS = cosines_CS * scale
            if is_softmax:
                rows_C1 = sums.rows_M[chunk, None]
                of_logits = ((logits_CS - rows_C1).exp() + (logits_CS - columns_S).exp()) / 2
            else:
                of_logits = (logits_CS if bias is None else logits_CS + bias).sigmoid()
            if step == 0:
                of_logits.diagonal(begin).sub_(1)
            of_images[chunk] += of_logits @ block_SW * scale
            of_block = of_block + of_logits.T @ images[chunk] * scale
            of_scale += (of_logits * cosines_CS).sum()
            if of_bias is not None:
                of_bias += of_logits.sum()
        if ring.size > 1:
            is_last = step == ring.size - 1
            travelling = [of_block] if is_last else [of_block, block_SW, *([columns_S] if is_softmax else [])]
            of_block, *others = ring.shift(travelling, lengths[(step + 1) % ring.size])
            if not is_last:
                block_SW, columns_S = others[0], others[-1] if is_softmax else columns_S
    return of_images, of_block, of_scale, of_bias


def contrastive_loss_reference(
    images_MW: Tensor, texts_MW: Tensor, scale: Tensor, bias: Tensor | None, kind: Kind
) -> Tensor:
    """`contrastive_loss` of one rank by all logits at once, and autograd."""
    logits_MM = scale * images_MW @ texts_MW.T
    if kind == "softmax":
        same_M = torch.arange(len(logits_MM), device=logits_MM.device)
        both = (F.cross_entropy(one, same_M, reduction="sum") for one in (logits_MM, logits_MM.T))
        return sum(both, logits_MM.new_zeros(())) / 2
    logits_MM = logits_MM if bias is None else logits_MM + bias
    signs_MM = 2 * torch.eye(len(logits_MM), dtype=logits_MM.dtype, device=logits_MM.device) - 1
    return -F.logsigmoid(signs_MM * logits_MM).sum()


@torch.no_grad()
def retrieval_ranks(
    images_MW: Tensor, texts_NW: Tensor, captions_N: Tensor, ring: Ring = ONE_RANK, chunk: int = CHUNK
) -> Tensor:
    """Return for each image how many other captions of all ranks are at least as similar as its own, int64 [M].

    captions_N: int64 numbers, equal where captions are; an equal one counts as the image's own. Numbers that are not
    finite make a similarity count as larger, so that nothing is right by accident.
    """
    lengths = ring.lengths(len(images_MW), images_MW.device)
    pairs_M, ranks_M = (images_MW * texts_NW).sum(1), torch.zeros_like(captions_N)
    block_SW, numbers_S = texts_NW, captions_N
    for step in range(ring.size):
        for begin in range(0, len(images_MW), chunk):
            rows = slice(begin, begin + chunk)
            is_less_CS = images_MW[rows] @ block_SW.T < pairs_M[rows, None]
            is_other_CS = captions_N[rows, None] != numbers_S
            ranks_M[rows] += (is_other_CS & ~is_less_CS).sum(1)
        if step < ring.size - 1:
            block_SW, numbers_S = ring.shift([block_SW, numbers_S], lengths[step + 1])
    return ranks_M
