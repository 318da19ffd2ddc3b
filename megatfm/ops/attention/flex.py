"""Attention by torch's FlexAttention (He et al. 2024), which computes only blocks of keys that are seen, on a GPU.

FlexAttention is imported on use, as the import takes a second (torch's compiler and sympy).
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.keyed_random import RATE_STEPS, draw_keep_mask_at

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width
# n heads that differ (or 1), Q query blocks, J key blocks

SIZE = 128
"""Tokens of a block."""

MIN_HEAD_WIDTH = 16
"""Smallest width of heads that the kernel supports (torch/_inductor/kernel/flex/flex_attention.py)."""


def flex(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    options: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference`; only biases by distance are supported.

    Dropout sets scores to −∞ inside the kernel, which then returns the mean of the kept values, and the log-sum-exp
    over these. A second pass, of a few values whose mean is not used, computes the log-sum-exp over all of them, by
    which the mean is rescaled.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    lengths = q_BNTH.shape[2], k_BKSH.shape[2]
    visits = mask.cached(("block mask", SIZE), lambda: block_mask(mask, *lengths))
    run: Any = flex_attention if torch.compiler.is_compiling() or not q_BNTH.is_cuda else _compile_flex_attention()
    arguments = {
        "block_mask": visits,
        "scale": options.scale,
        "enable_gqa": q_BNTH.shape[1] != k_BKSH.shape[1],
        "return_aux": AuxRequest(lse=sinks_N is not None or rng_keys_BNT is not None),
    }
    score_mod = _cap_scores(options.softcap) if options.softcap else None
    if bias is not None:
        score_mod = _add_bias(bias.to(q_BNTH.dtype), q_BNTH.shape[2], score_mod)
    if rng_keys_BNT is None:
        out_BNTV, aux = run(q_BNTH, k_BKSH, v_BKSV, score_mod=score_mod, **arguments)
        if sinks_N is None:
            return out_BNTV
        factor_BNT = torch.sigmoid(aux.lse - sinks_N.to(aux.lse.dtype)[:, None])
        return out_BNTV * factor_BNT[..., None].to(out_BNTV.dtype)
    threshold = options.dropout_threshold
    out_BNTV, kept_aux = run(
        q_BNTH, k_BKSH, v_BKSV, score_mod=_drop_scores(rng_keys_BNT, threshold, score_mod), **arguments
    )
    _, aux = run(q_BNTH, k_BKSH, v_BKSV[..., :MIN_HEAD_WIDTH], score_mod=score_mod, **arguments)
    lse_BNT = aux.lse
    if sinks_N is not None:
        lse_BNT = torch.logaddexp(lse_BNT, sinks_N.to(lse_BNT.dtype)[:, None])
    lse_BNT = lse_BNT.masked_fill(lse_BNT == -torch.inf, 0)  # queries that see no key
    factor_BNT = (kept_aux.lse - lse_BNT).exp() * (RATE_STEPS / (RATE_STEPS - threshold))
    return out_BNTV * factor_BNT[..., None].to(out_BNTV.dtype)


def block_mask(mask: AttentionMask, queries: int, keys: int) -> "BlockMask":
    """Return torch's block mask, from the table of blocks: `create_block_mask` would examine all pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    table_BnQJ, full_BnQJ = mask.block_mask(SIZE), mask.full_block_mask(SIZE)
    if keys % SIZE:
        full_BnQJ = full_BnQJ & (torch.arange(full_BnQJ.shape[-1], device=full_BnQJ.device) < full_BnQJ.shape[-1] - 1)
    full_BnQJ = full_BnQJ & table_BnQJ
    partial = table_BnQJ & ~full_BnQJ

    def mask_mod(b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask.mask_mod(b, n, q, k)

    return BlockMask.from_kv_blocks(
        *_order_kv_blocks(partial),
        *_order_kv_blocks(full_BnQJ),
        BLOCK_SIZE=SIZE,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def _order_kv_blocks(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks that each query block sees, int32 [B, n, Q], and [B, n, Q, J], which begins with
    their indices."""
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32).contiguous(), order.to(torch.int32).contiguous()


def _cap_scores(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _add_bias(bias_NL: Tensor, total: int, score_mod: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    def add(score: Tensor, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if score_mod is None else score_mod(score, b, n, q, k)
        return score + bias_NL[n, k - q + (total - 1)]

    return add


def _drop_scores(keys_BNT: Tensor, threshold: int, score_mod: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    def drop(score: Tensor, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if score_mod is None else score_mod(score, b, n, q, k)
        return torch.where(draw_keep_mask_at(keys_BNT[b, n, q], k.to(torch.int64), threshold), score, -torch.inf)

    return drop


@cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
