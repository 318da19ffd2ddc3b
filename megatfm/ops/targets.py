"""Targets that are further on in a row than the next token."""

import torch
from torch import Tensor

from megatfm.ops.cross_entropy import IGNORE


def shifted_targets(targets_BT: Tensor, documents_BT: Tensor | None, n: int) -> Tensor:
    """The targets `n` tokens further on in the same document, −100 where there is none, [B, T]."""
    ahead = torch.full_like(targets_BT, IGNORE)
    ahead[:, :-n] = targets_BT[:, n:]
    if documents_BT is not None:
        ahead[:, :-n][documents_BT[:, n:] != documents_BT[:, :-n]] = IGNORE
    return ahead
