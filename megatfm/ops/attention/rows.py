"""Attention whose scores no kernel knows, of some queries at a time: those of all pairs are never there at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

AT_ONCE = 2**26
"""So many scores are held at once; those of more are computed again in the backward pass."""


def by_rows(attend: Callable[[slice], Tensor], queries: int, scores: int) -> Tensor:
    """[B, N, T, V] of `attend`, which gives it for some of the queries. scores: of one query, in all rows and heads."""
    step = max(1, AT_ONCE // scores)
    if step >= queries or torch.compiler.is_compiling():
        return attend(slice(0, queries))
    parts = [slice(at, min(at + step, queries)) for at in range(0, queries, step)]
    if not torch.is_grad_enabled():
        return torch.cat([attend(rows) for rows in parts], 2)
    made = [checkpoint(attend, rows, use_reentrant=False, preserve_rng_state=False) for rows in parts]
    return torch.cat(made, 2)
