"""FlashAttention over documents of different lengths in rows laid end to end (Dao 2023), without a mask.

The operator is `torch.nn.attention.varlen.varlen_attn`, for GPUs only.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.ops.attention.fused import FLASH_MAX_WIDTH
from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.log_once import constant_when_compiled

# B batch, N query heads, K key-value heads, T tokens, H head width, C documents, padded

MIN_DOCUMENT_LENGTH = 128
"""Mean length of documents for which `cu_seqlens` has entries; for shorter ones it has four times as many, a new shape
for which blocks are compiled again."""

REQUIRED_PARAMETERS = ("scale", "window_size")
"""Parameters of the operator that torch 2.10 lacks."""


def varlen(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    options: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` without bias, soft cap, dropout and sinks."""
    assert mask.window is not None
    rows, heads, length = q_BNTH.shape[:3]
    cu_seqlens_C = mask.cu_seqlens()
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKTH, v_BKTH))
    arguments: dict[str, Any] = {"scale": options.scale, "window_size": mask.window}
    if heads != k.shape[1]:
        arguments["enable_gqa"] = True
    # The row's length as maximum, since the longest document differs from batch to batch.
    out: Tensor = get_operator()(q, k, v, cu_seqlens_C, cu_seqlens_C, length, length, **arguments)
    return out.unflatten(0, (rows, length)).transpose(1, 2)


@constant_when_compiled
def supports_head_dims(width: int, v_width: int, *, grouped: bool) -> bool:
    """Return whether this torch's operator supports head widths. grouped: query heads share key heads."""
    fits = width == v_width and width <= FLASH_MAX_WIDTH and width % 8 == 0
    return (
        fits
        and (not grouped or "enable_gqa" in list_parameters())
        and all(n in list_parameters() for n in REQUIRED_PARAMETERS)
    )


def compute_cu_seqlens(documents_BT: NDArray[Any]) -> NDArray[np.int32]:
    """Return the starts of documents in rows laid end to end, int32 [C + 1], padded with the total length.

    Padding tokens count as one more document of their row. C depends only on the sizes, so that kernels see one shape;
    see `MIN_DOCUMENT_LENGTH`.
    """
    rows, length = documents_BT.shape
    is_start = np.ones((rows, length), bool)
    is_start[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts = np.flatnonzero(is_start)
    tokens, mean_length = rows * length, MIN_DOCUMENT_LENGTH
    while len(starts) > rows + -(-tokens // mean_length):
        mean_length = max(mean_length // 4, 1)
    cu_seqlens = np.full(rows + -(-tokens // mean_length) + 1, tokens, np.int32)
    cu_seqlens[: len(starts)] = starts
    return cu_seqlens


def get_operator() -> Callable[..., Any]:
    """Return torch's operator, imported on use."""
    from torch.nn.attention.varlen import varlen_attn

    result: Callable[..., Any] = varlen_attn
    return result


@cache
def list_parameters() -> frozenset[str]:
    """Return the names of the operator's parameters, which differ between versions of torch; empty without it."""
    try:
        return frozenset(inspect.signature(get_operator()).parameters)
    except (ImportError, AttributeError):
        return frozenset()


def uniform_cu_seqlens(rows: int, length: int, device: torch.device) -> Tensor:
    """Return `cu_seqlens` of rows of one document each, int32 [rows + 1]."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
