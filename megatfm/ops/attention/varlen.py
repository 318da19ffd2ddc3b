"""Attention by FlashAttention over rows laid end to end, each document by itself (Dao 2023): no mask, and no blocks of
other documents visited. torch has it as `torch.nn.attention.varlen.varlen_attn`, for GPUs only.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.log_once import constant_when_compiled

# B batch, N query heads, K key-value heads, T tokens, H head width, C documents that there is room for

ROOM = 128
"""Tokens a document, at least and on average: for documents that are shorter there is four times as much room, and what
is compiled is compiled once more."""

WIDEST = 256
"""Widest heads that FlashAttention takes; widths are multiples of 8."""

NEEDED = ("scale", "window_size")
"""Parameters that torch 2.10 has not."""


def varlen(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    variant: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` without biases, soft cap, dropped probabilities and sinks."""
    assert mask.window is not None
    rows, heads, length = q_BNTH.shape[:3]
    starts_C = mask.starts()
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKTH, v_BKTH))
    options: dict[str, Any] = {"scale": variant.scale, "window_size": mask.window}
    if heads != k.shape[1]:
        options["enable_gqa"] = True
    # The longest is the row's length and not the longest document's, which would be another one in each batch.
    out: Tensor = operator()(q, k, v, starts_C, starts_C, length, length, **options)
    return out.unflatten(0, (rows, length)).transpose(1, 2)


@constant_when_compiled
def supports_head_dims(width: int, v_width: int, *, grouped: bool) -> bool:
    """Whether this torch has the operator, and it takes heads of these widths, of which several share keys."""
    fits = width == v_width and width <= WIDEST and width % 8 == 0
    return fits and (not grouped or "enable_gqa" in parameters()) and all(n in parameters() for n in NEEDED)


def cu_seqlens_from_documents(documents_BT: NDArray[Any]) -> NDArray[np.int32]:
    """Begins of documents in rows laid end to end, and at last the end: int32 [C + 1], with the end again and
    again, as often as there is room left. Padding counts as one more document of its row.

    C depends on the sizes alone, so that kernels see one shape; see `ROOM`.
    """
    rows, length = documents_BT.shape
    begins = np.ones((rows, length), bool)
    begins[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    begin_indices = np.flatnonzero(begins)
    tokens, room = rows * length, ROOM
    while len(begin_indices) > rows + -(-tokens // room):
        room = max(room // 4, 1)
    starts = np.full(rows + -(-tokens // room) + 1, tokens, np.int32)
    starts[: len(begin_indices)] = begin_indices
    return starts


def operator() -> Callable[..., Any]:
    """torch's; it is imported where it runs."""
    from torch.nn.attention.varlen import varlen_attn

    result: Callable[..., Any] = varlen_attn
    return result


@cache
def parameters() -> frozenset[str]:
    """Names of the options that torch's operator takes: they differ from version to version."""
    try:
        return frozenset(inspect.signature(operator()).parameters)
    except (ImportError, AttributeError):
        return frozenset()


def uniform_cu_seqlens(rows: int, length: int, device: torch.device) -> Tensor:
    """Begins of rows that are one document each."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
