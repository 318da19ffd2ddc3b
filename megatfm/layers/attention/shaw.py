"""Relative positions in keys and values (Shaw et al. 2018)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ScaledAttention, ShawConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.reference import attend_in_chunks, compute_probabilities, zero_blind_queries

if TYPE_CHECKING:  # patterns live with attention, which reads positions
    from megatfm.layers.attention.patterns import AttentionPattern

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, R clipped distances


class ShawCore(nn.Module):
    """Attention that adds a learned vector for the clipped distance to each key and value, shared by all heads."""

    tp_plan = (("", "replicated_partial_grad"), ("dropout", "local_shard_dropout"))

    cp_plan = "attention"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: "AttentionPattern") -> None:
        super().__init__()
        options = require_variant(config.attention, ScaledAttention, "model.attention")
        if getattr(options, "sinks", False):
            raise UsageError(
                "model.attention.sinks = true: model.position.name = 'shaw' does not support attention sinks: leave "
                "sinks out, or choose position.name = 'rope'"
            )
        self.pattern, self.n_heads = pattern, options.n_heads
        self.channels = 2 * options.n_heads * config.head_width
        self.max_distance = require_variant(config.position, ShawConfig, "model.position").max_distance
        self.scale = options.scale or config.head_width**-0.5
        self.softcap = options.softcap
        rows = 2 * self.max_distance + 1
        self.keys = nn.Parameter(torch.empty(rows, config.head_width))
        self.values = nn.Parameter(torch.empty(rows, config.head_width))
        self.initial = dict.fromkeys(("keys", "values"), initial("relative", rows, config.head_width))
        self.roles = dict.fromkeys(("keys", "values"), "embedding")
        self.dropout = Dropout(options.dropout, "attention")

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of dot-product attention, and of products with the distance vectors of keys and of values."""
        by_distance = self.channels * len(self.keys) * tokens.n
        return self.pattern.cost(tokens, self.channels, self.n_heads) + Cost(
            attention_macs=by_distance, visible_attention_macs=by_distance
        )

    def forward(
        self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, sequence: SequenceMetadata, bias: Tensor | None = None
    ) -> Tensor:
        """Return [B, N, T, H]."""
        if (groups := q_BNTH.shape[1] // k_BKSH.shape[1]) > 1:
            k_BKSH, v_BKSH = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSH))
        q_BNTH = q_BNTH * self.scale
        rng_keys_BNT = self.dropout.make_head_rng_keys(sequence, q_BNTH.shape[1])

        def attend(queries: slice) -> Tensor:
            chunk_keys = None if rng_keys_BNT is None else rng_keys_BNT[:, :, queries]
            return self._attend(q_BNTH[:, :, queries], k_BKSH, v_BKSH, sequence, queries, chunk_keys)

        return attend_in_chunks(attend, q_BNTH, k_BKSH.shape[2], f"{self.pattern!r} with Shaw's positions")

    def _attend(
        self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, sequence: SequenceMetadata, queries: slice,
        rng_keys_BNT: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attend with a slice of the queries, which are already scaled."""
        distances_TS = (
            sequence.relative_positions(queries).clamp(-self.max_distance, self.max_distance) + self.max_distance
        )
        index_BNTS = distances_TS.expand(*q_BNTH.shape[:2], *distances_TS.shape)
        scores_BNTS = q_BNTH @ k_BKSH.transpose(-1, -2) + (q_BNTH @ self.keys.T).gather(-1, index_BNTS)
        if self.softcap:
            scores_BNTS = self.softcap * torch.tanh(scores_BNTS / self.softcap)
        heads = q_BNTH.shape[1] if self.pattern.differs_by_head else 1
        mask_B1TS = sequence.mask(self.pattern, self.dropout.shard_index * heads, heads, queries)
        if mask_B1TS is None and self.pattern.builtin_mask == "causal":
            mask_B1TS = (sequence.relative_positions(queries) <= 0)[None, None]
        probabilities_BNTS = compute_probabilities(scores_BNTS, mask_B1TS, self.dropout.rate, rng_keys_BNT)
        zeros_BNTR = q_BNTH.new_zeros(*q_BNTH.shape[:3], len(self.values))
        by_distance_BNTR = zeros_BNTR.scatter_add(-1, index_BNTS, probabilities_BNTS)
        return zero_blind_queries(probabilities_BNTS @ v_BKSH + by_distance_BNTR @ self.values, mask_B1TS)


POSITIONS.register("shaw")(PositionEncoding(attention=ShawCore))
