"""Attention by torch's FlexAttention (He et al. 2024), which visits only blocks of keys that are seen, on a GPU.

It is imported where it runs: with it come a second of torch's compiler and sympy.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatfm.ops.attention.products import AttentionOptions
from megatfm.ops.attention.visible import AttentionMask
from megatfm.ops.dropout import RATE_STEPS, keep_at

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width
# n heads that differ (or 1), Q query blocks, J key blocks

SIZE = 128
"""Tokens of a block."""

NARROW = 16
"""Channels of the values where a kernel's output is not looked at: the fewest that it takes."""


def flex(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    seen: AttentionMask,
    bias: Tensor | None,
    variant: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """As `attention_reference`, with biases by distance only.

    Probabilities are dropped inside the kernel, by the keys: with scores of −∞ at what is dropped it gives the mean of
    the values that are left, and the logarithm of the sum over these. A second pass gives that over all of them.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    lengths = q_BNTH.shape[2], k_BKSH.shape[2]
    visits = seen.cached(("block mask", SIZE), lambda: block_mask(seen, *lengths))
    run: Any = flex_attention if torch.compiler.is_compiling() or not q_BNTH.is_cuda else _compiled()
    options = {
        "block_mask": visits,
        "scale": variant.scale,
        "enable_gqa": q_BNTH.shape[1] != k_BKSH.shape[1],
        "return_aux": AuxRequest(lse=sinks_N is not None or rng_keys_BNT is not None),
    }
    changed = _capped(variant.softcap) if variant.softcap else None
    if bias is not None:
        changed = _biased(bias.to(q_BNTH.dtype), q_BNTH.shape[2], changed)
    if rng_keys_BNT is None:
        made, beside = run(q_BNTH, k_BKSH, v_BKSV, score_mod=changed, **options)
        if sinks_N is None:
            return made
        shares_BNT = torch.sigmoid(beside.lse - sinks_N.to(beside.lse.dtype)[:, None])
        return made * shares_BNT[..., None].to(made.dtype)
    threshold = round(variant.dropout * RATE_STEPS)
    made, left = run(q_BNTH, k_BKSH, v_BKSV, score_mod=_dropped(rng_keys_BNT, threshold, changed), **options)
    _, beside = run(q_BNTH, k_BKSH, v_BKSV[..., :NARROW], score_mod=changed, **options)
    whole_BNT = beside.lse
    if sinks_N is not None:
        whole_BNT = torch.logaddexp(whole_BNT, sinks_N.to(whole_BNT.dtype)[:, None])
    whole_BNT = whole_BNT.masked_fill(whole_BNT == -torch.inf, 0)  # of a query that sees no key
    shares_BNT = (left.lse - whole_BNT).exp() * (RATE_STEPS / (RATE_STEPS - threshold))
    return made * shares_BNT[..., None].to(made.dtype)


def block_mask(seen: AttentionMask, queries: int, keys: int) -> "BlockMask":
    """The blocks that are visited, from the table of blocks: torch's own way asks for all pairs first."""
    from torch.nn.attention.flex_attention import BlockMask

    table_BnQJ, whole = seen.block_mask(SIZE), seen.full_block_mask(SIZE)
    if keys % SIZE:
        whole = whole & (torch.arange(whole.shape[-1], device=whole.device) < whole.shape[-1] - 1)
    whole = whole & table_BnQJ
    partial = table_BnQJ & ~whole

    def pair(b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen.mask_mod(b, n, q, k)

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=SIZE, mask_mod=pair, seq_lengths=(queries, keys)
    )


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries sees, int32 [B, n, Q], and which, those first [B, n, Q, J]."""
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32).contiguous(), order.to(torch.int32).contiguous()


def _capped(most: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return most * torch.tanh(score / most)

    return cap


def _biased(bias_NL: Tensor, total: int, changed: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    def add(score: Tensor, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if changed is None else changed(score, b, n, q, k)
        return score + bias_NL[n, k - q + (total - 1)]

    return add


def _dropped(
    keys_BNT: Tensor, threshold: int, changed: Callable[..., Tensor] | None
) -> Callable[..., Tensor]:
    def drop(score: Tensor, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if changed is None else changed(score, b, n, q, k)
        return torch.where(keep_at(keys_BNT[b, n, q], k.to(torch.int64), threshold), score, -torch.inf)

    return drop


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    made: Callable[..., Any] = torch.compile(flex_attention)
    return made
