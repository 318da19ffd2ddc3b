"""Embedding and cross-entropy over a vocabulary cut into shards, one a rank (Shoeybi et al. 2019, section 3)."""

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.ops.cross_entropy import LogitOptions, cross_entropy
from megatfm.parallel.collectives import all_gather_no_grad

# M tokens, D model width, W rows of the vocabulary that are held here


def vocab_parallel_embedding(tokens: Tensor, weight_WD: Tensor, vocab_start: int) -> Tensor:
    """Rows of the tokens held here, from `first` on, and zeros for the others: a partial [..., D]."""
    local = tokens - vocab_start
    held = (local >= 0) & (local < weight_WD.shape[0])
    rows = F.embedding(local.where(held, 0), weight_WD)
    return rows * held[..., None].to(rows.dtype)


def vocab_parallel_cross_entropy(
    hidden_MD: Tensor,
    weight_WD: Tensor,
    targets_M: Tensor,
    bias_W: Tensor | None,
    variant: LogitOptions,
    vocab_start: int,
    group: ProcessGroup,
    chunk: int = 1024,
) -> Tensor:
    """Summed cross-entropy, the same on all ranks; the gradient to `hidden` is partial. vocab_start: row held here."""
    return cross_entropy(
        hidden_MD,
        weight_WD,
        targets_M,
        bias_W,
        variant,
        chunk=chunk,
        vocab_start=vocab_start,
        all_gather=lambda values: all_gather_no_grad(values, group),
    )
