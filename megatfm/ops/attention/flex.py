"""Attention by torch's FlexAttention (He et al. 2024), which visits only blocks of keys that are seen, on a GPU.

It is imported where it runs: with it come a second of torch's compiler and sympy.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.keyed_random import RATE_STEPS, keep_at

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
    mask: AttentionMask,
    bias: Tensor | None,
    variant: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` with biases by distance only.

    Probabilities are dropped inside the kernel, by the keys: with scores of −∞ at what is dropped it gives the mean of
    the values that are left, and the logarithm of the sum over these. A second pass gives that over all of them.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    lengths = q_BNTH.shape[2], k_BKSH.shape[2]
    visits = mask.cached(("block mask", SIZE), lambda: block_mask(mask, *lengths))
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
        out_BNTV, aux = run(q_BNTH, k_BKSH, v_BKSV, score_mod=changed, **options)
        if sinks_N is None:
            return out_BNTV
        shares_BNT = torch.sigmoid(aux.lse - sinks_N.to(aux.lse.dtype)[:, None])
        return out_BNTV * shares_BNT[..., None].to(out_BNTV.dtype)
    threshold = round(variant.dropout * RATE_STEPS)
    out_BNTV, kept_aux = run(
        q_BNTH, k_BKSH, v_BKSV, score_mod=_dropped(rng_keys_BNT, threshold, changed), **options
    )
    _, aux = run(q_BNTH, k_BKSH, v_BKSV[..., :NARROW], score_mod=changed, **options)
    whole_BNT = aux.lse
    if sinks_N is not None:
        whole_BNT = torch.logaddexp(whole_BNT, sinks_N.to(whole_BNT.dtype)[:, None])
    whole_BNT = whole_BNT.masked_fill(whole_BNT == -torch.inf, 0)  # of a query that sees no key
    shares_BNT = (kept_aux.lse - whole_BNT).exp() * (RATE_STEPS / (RATE_STEPS - threshold))
    return out_BNTV * shares_BNT[..., None].to(out_BNTV.dtype)


def block_mask(mask: AttentionMask, queries: int, keys: int) -> "BlockMask":
    """The blocks that are visited, from the table of blocks: torch's own way asks for all pairs first."""
    from torch.nn.attention.flex_attention import BlockMask

    table_BnQJ, full_BnQJ = mask.block_mask(SIZE), mask.full_block_mask(SIZE)
    if keys % SIZE:
        full_BnQJ = full_BnQJ & (
            torch.arange(full_BnQJ.shape[-1], device=full_BnQJ.device) < full_BnQJ.shape[-1] - 1
        )
    full_BnQJ = full_BnQJ & table_BnQJ
    partial = table_BnQJ & ~full_BnQJ

    def pair(b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask.mask_mod(b, n, q, k)

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full_BnQJ), BLOCK_SIZE=SIZE, mask_mod=pair, seq_lengths=(queries, keys)
    )


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks that each query block sees, int32 [B, n, Q], and their indices, first in [B, n, Q, J]."""
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

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
