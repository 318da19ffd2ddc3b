"""Attention whose scores no kernel knows, of some queries at a time: those of all pairs are never there at once."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatfm.ops.compiled import constant_when_compiled

# B batch, N query heads, T queries, H head width, V value width

MAX_SCORES = 2**26
"""So many scores are held at once; those of more are computed again in the backward pass."""

log = logging.getLogger("megatfm")


def attend_in_chunks(attend: Callable[[slice], Tensor], q_BNTH: Tensor, keys: int, kind: str) -> Tensor:
    """[B, N, T, V] of `attend`, which gives it for some of the queries. keys: of a row. kind: as the log calls it."""
    queries = q_BNTH.shape[2]
    step = max(1, MAX_SCORES // (q_BNTH.shape[:2].numel() * keys))
    at_once = step >= queries or torch.compiler.is_compiling()
    log_once(kind, at_once, q_BNTH.device.type, q_BNTH.dtype)
    if at_once:
        return attend(slice(0, queries))
    parts = [slice(at, min(at + step, queries)) for at in range(0, queries, step)]
    if not torch.is_grad_enabled():
        return torch.cat([attend(rows) for rows in parts], 2)
    made = [checkpoint(attend, rows, use_reentrant=False, preserve_rng_state=False) for rows in parts]
    return torch.cat(made, 2)


@constant_when_compiled
def log_once(kind: str, at_once: bool, device: str, dtype: torch.dtype) -> None:
    """Log once how attention of a kind is computed."""
    if (told := (kind, at_once, device, dtype)) not in _LOGGED:
        _LOGGED.add(told)
        how = "all queries at once" if at_once else "some queries at a time, and again in the backward pass"
        log.info("attention %s, on %s in %s: kernel products, %s", kind, device, str(dtype)[6:], how)


_LOGGED: set[tuple[str, bool, str, torch.dtype]] = set()
