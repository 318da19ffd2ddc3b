"""Embedding and cross-entropy over a vocabulary cut into shards, one a rank (Shoeybi et al. 2019, section 3)."""

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.ops.cross_entropy import LogitVariant, cross_entropy
from megatfm.parallel.collectives import all_parts

# M tokens, D model width, W rows of the vocabulary that are held here


def embed_shard(tokens: Tensor, weight_WD: Tensor, first: int) -> Tensor:
    """Rows of the tokens held here, from `first` on, and zeros for the others: a partial [..., D]."""
    local = tokens - first
    held = (local >= 0) & (local < weight_WD.shape[0])
    rows = F.embedding(local.where(held, 0), weight_WD)
    return rows * held[..., None].to(rows.dtype)


def cross_entropy_shard(
    hidden_MD: Tensor,
    weight_WD: Tensor,
    targets_M: Tensor,
    bias_W: Tensor | None,
    variant: LogitVariant,
    first: int,
    group: ProcessGroup,
    chunk: int = 1024,
) -> Tensor:
    """Summed cross-entropy, the same on all ranks; the gradient to `hidden` is partial. first: row held here."""
    return cross_entropy(
        hidden_MD,
        weight_WD,
        targets_M,
        bias_W,
        variant,
        chunk=chunk,
        first=first,
        join=lambda values: all_parts(values, group),
    )
