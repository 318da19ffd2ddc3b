"""Dot-product attention between projected heads. Context parallelism replaces the forward of this module."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ScaledAttention, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.layers.attention.patterns.mask import PatternMask, find_global_queries, find_reachable_keys
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.torch_private import constant_when_compiled
from megatfm.registry import Registry
from megatfm.terminal import log_once

# B batch, N query heads, K key-value heads, T queries, S keys, H head width


class HeadProjections(nn.Module):
    """Projections of tokens to the queries, keys and values of heads, and of the heads' outputs back to tokens.

    The base of attention layers. Heads are viewed as −1, so that any number of local heads works.
    """

    def __init__(
        self,
        config: ModelConfig,
        initial: Initialiser,
        *,
        bias: bool,
        key_bias: bool | None = None,
        output_bias: bool | None = None,
    ) -> None:
        """key_bias, output_bias: whether the projections of keys and of outputs have a bias; None: as `bias`."""
        super().__init__()
        d, self.head_dim, n_kv_heads = config.d_model, config.head_width, config.attention.kv_heads
        width, kv_width = config.attention.n_heads * self.head_dim, n_kv_heads * self.head_dim
        key_bias = bias if key_bias is None else key_bias
        output_bias = bias if output_bias is None else output_bias
        self.wq = Linear(d, width, initial("query", d, width), bias=bias)
        self.wk = Linear(d, kv_width, initial("key", d, kv_width), bias=key_bias, heads=n_kv_heads)
        self.wv = Linear(d, kv_width, initial("value", d, kv_width), bias=bias, heads=n_kv_heads)
        self.wo = Linear(width, d, initial("out", width, d), bias=output_bias)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape […, T, N · H] → […, N, T, H]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)


class DotProductAttention(nn.Module):
    """softmax(q kᵀ · scale + bias) v over the keys that the pattern and the sequence make visible to each query.

    channels: query plus value channels over all heads; None: twice the heads' width.
    """

    tp_plan = (("dropout", "local_shard_dropout"),)

    cp_plan = "attention"

    def __init__(
        self,
        config: ModelConfig,
        initial: Initialiser,
        pattern: AttentionPattern,
        *,
        scale: float | None = None,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        options = require_variant(config.attention, ScaledAttention, "model.attention")
        self.pattern, self.pattern_name, self.n_heads = pattern, repr(pattern), options.n_heads
        self.channels = channels or 2 * options.n_heads * config.head_width
        self.dropout = Dropout(options.dropout, "cross" if pattern.is_cross_attention else "attention")
        self.sinks = Sinks(options.n_heads, initial) if getattr(options, "sinks", False) else None
        self.options = AttentionOptions(scale=options.scale or scale, softcap=options.softcap, dropout=options.dropout)

    def attention_mask(self, sequence: SequenceMetadata, n_heads: int) -> PatternMask:
        """Return the mask for the local heads."""
        return PatternMask(self.pattern, sequence, self.dropout.shard_index * n_heads, n_heads)

    def find_reachable_keys(self, row: SequenceMetadata, token_indices: Tensor) -> Tensor:
        """Return the key indices in full rows that queries at these token indices may see; global queries excepted."""
        return find_reachable_keys(self.pattern.simplify(row.length), row, token_indices)

    def is_local(self, length: int) -> bool:
        """Return whether the pattern limits the visible keys in rows of this length, besides document boundaries."""
        return self.pattern.simplify(length).key_ranges(0, 1, length) is not None

    def find_global_queries(self, row: SequenceMetadata, indices_by_rank: Sequence[Tensor]) -> Tensor:
        """Return the token indices of global queries whose document spans several ranks."""
        return find_global_queries(self.pattern.simplify(row.length), row, indices_by_rank)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the scores and of the weighted sums of values."""
        return self.pattern.cost(tokens, self.channels, self.n_heads)

    def forward(
        self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, sequence: SequenceMetadata, bias: Tensor | None = None
    ) -> Tensor:
        """Return [B, N, T, H]. bias: as in `attention_reference`."""
        return self.attend_head_shard(self.dropout.shard_index, q_BNTH, k_BKSH, v_BKSH, sequence, bias)

    def attend_head_shard(
        self,
        head_shard: int,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        mask: AttentionMask | None = None,
    ) -> Tensor:
        """Attend with heads head_shard · N to (head_shard + 1) · N − 1.

        mask: overrides the pattern's, for keys that are not the sequence's tokens.
        """
        n_heads = q_BNTH.shape[1]
        rng_keys = self.dropout.make_head_rng_keys(sequence, n_heads, head_shard)
        mask = mask or PatternMask(self.pattern, sequence, head_shard * n_heads, n_heads)
        sinks = None
        if self.sinks is not None:
            sinks_by_shard = self.sinks.weight.view(-1, n_heads)
            sinks = sinks_by_shard[head_shard % len(sinks_by_shard)]
        request = self.describe_call(q_BNTH, k_BKSH, v_BKSH, mask, bias)
        kernel = choose_kernel(request)
        log_kernel(kernel.name, self.pattern_name, request)
        return kernel.run(q_BNTH, k_BKSH, v_BKSH, mask, bias, self.options, rng_keys, sinks)

    def describe_call(
        self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: AttentionMask, bias: Tensor | None
    ) -> AttentionRequest:
        """Return what the choice of a kernel depends on."""
        return AttentionRequest.from_inputs(
            q_BNTH,
            k_BKSH,
            mask,
            self.options,
            has_dropout=self.dropout.active,
            bias=bias,
            sinks=self.sinks is not None,
            v_width=v_BKSH.shape[-1],
        )


class Sinks(nn.Module):
    """Attention sinks: a learned score for each head that takes part in the softmax and has no value (gpt-oss)."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, n_heads: int, initial: Initialiser) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.initial = {"weight": initial("relative", 1, n_heads)}
        self.roles = {"weight": "vector"}


def log_kernel(kernel: str, pattern: str, request: AttentionRequest) -> None:
    """Log once which kernel computes a kind of attention."""
    is_slow = request.needs_dense_mask and kernel in ("products", "fused")
    drops_twice = request.has_dropout and kernel == "flex"
    _log_kernel(kernel, pattern, request.builtin_mask, is_slow, drops_twice, request.device, request.dtype)


@constant_when_compiled
def _log_kernel(
    kernel: str, pattern: str, builtin_mask: str | None, is_slow: bool, drops_twice: bool, device: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    forms = {
        "products": "with a dense mask",
        "fused": "with a dense mask",
        "varlen": "over packed documents",
        "documents": "document by document",
    }
    form = {"all": "without a mask", "causal": "with its causal mask"}.get(
        builtin_mask or "", forms.get(kernel, "over blocks")
    )
    cost = ""
    if is_slow:
        cost = ": it computes all pairs, which is slow, and memory grows with the square of the length"
    elif drops_twice:
        cost = ": it computes the scores twice because of attention.dropout; set that to 0 to halve the time"
    log_once(f"attention {pattern} on {device} in {str(dtype)[6:]} runs in kernel {kernel}, {form}{cost}")


ATTENTIONS: Registry[Callable[[ModelConfig, Initialiser, AttentionPattern], nn.Module]] = Registry("attention")
"""Attention layers by name. They are called with x [B, T, D], sequence, bias, memory and cache; see `gqa.py`."""
