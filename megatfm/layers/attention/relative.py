"""Attention that reads relative positions as vectors: Shaw et al. 2018, and DeBERTa's disentangled attention.

`shaw` adds a vector for the distance to each key and value. DeBERTa (He et al. 2021) has separate scores for content
and relative position: `deberta` projects positions with separate matrices (equations 2 to 4), `deberta_v2` reuses the
content projections (appendix A.11) and puts relative positions into logarithmic buckets.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatfm.config import (
    DebertaPositionConfig,
    DebertaV2PositionConfig,
    ModelConfig,
    ScaledAttention,
    ShawConfig,
    require_variant,
)
from megatfm.cost import Cost, TokenCounts, sum_costs
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, HeadProjections
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.local import require_full
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.reference import attend_in_chunks, compute_probabilities, zero_blind_queries

# B batch, T queries, S keys, D model width, N query heads, K key-value heads, H head width
# R relative positions, clipped or in buckets


class _DisentangledProjections(HeadProjections):
    """Base: projections of tokens, and of the position table by `get_position_projections`, around DisentangledCore."""

    cp_plan = "local"
    core: "DisentangledCore"

    def __init__(self, config: ModelConfig, initial: Initialiser, *, key_bias: bool) -> None:
        super().__init__(config, initial, bias=True, key_bias=key_bias)
        require_full(config)

    def get_position_projections(self) -> tuple[Linear, Linear]:
        """Return the projections of the position table to queries and keys; here those of the content."""
        return self.wq, self.wk

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of projecting the tokens and the position table, and of the core."""
        table = sum_costs(self.get_position_projections(), tokens.with_count(self.core.n_rows))
        return sum_costs((self.wq, self.wk, self.wv, self.wo), tokens) + table + self.core.cost(tokens)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D]. bias: the relative position table [R, D]."""
        q, k, v = (self._split_heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        q_position, k_position = (self._split_heads(w(bias)) for w in self.get_position_projections())
        heads_BNTH = self.core(q, k, v, sequence, (q_position, k_position))
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))


@ATTENTIONS.register("deberta")
class DisentangledAttention(_DisentangledProjections):
    """Scores are content·content + content·position + position·content, scaled by 1/√(3H).

    The position-to-content term uses the vector of query − key, as in the released code; equation 4 has key − query.
    """

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("w[qk]_position", "colwise"), ("wo", "rowwise"))
    lora_without_dropout = ("wq_position", "wk_position")  # they read the position table

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__(config, initial, key_bias=False)
        if not isinstance(config.position, DebertaPositionConfig) or pattern.builtin_mask != "all":
            raise UsageError(
                "model.attention.name = 'deberta' needs model.position.name = 'deberta' and family = 'encoder'"
            )
        d, width = config.d_model, config.attention.n_heads * config.head_width
        farthest = config.position.max_distance
        self.wq_position = Linear(d, width, initial("query", d, width), bias=True)
        self.wk_position = Linear(d, width, initial("key", d, width))
        self.core = DisentangledCore(config, pattern, partial(_clamp_to_row, farthest=farthest), 2 * farthest)

    def get_position_projections(self) -> tuple[Linear, Linear]:
        """Return projections that only positions use."""
        return self.wq_position, self.wk_position


@ATTENTIONS.register("deberta_v2")
class DisentangledSharedAttention(_DisentangledProjections):
    """Disentangled attention whose relative positions share the content projections of queries and keys."""

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))
    lora_without_dropout = ("wq", "wk")  # they also read the position table

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__(config, initial, key_bias=True)
        if not isinstance(config.position, DebertaV2PositionConfig) or pattern.builtin_mask != "all":
            raise UsageError(
                "model.attention.name = 'deberta_v2' needs model.position.name = 'deberta_v2' and family = 'encoder'"
            )
        n, farthest = config.position.buckets, config.position.max_distance
        self.core = DisentangledCore(config, pattern, partial(_bucket_to_row, n=n, farthest=farthest), 2 * n)


class DisentangledCore(nn.Module):
    """Scores, softmax and weighted sum of disentangled attention.

    rows: maps distances query − key to rows of the position table. n_rows: size of that table.
    """

    tp_plan = (("dropout", "local_shard_dropout"),)

    cp_plan = "attention"

    def __init__(
        self, config: ModelConfig, pattern: AttentionPattern, rows: Callable[[Tensor], Tensor], n_rows: int
    ) -> None:
        super().__init__()
        self.pattern, self.rows, self.scale = pattern, rows, (3 * config.head_width) ** -0.5
        self.n_heads, self.n_rows = config.attention.n_heads, n_rows
        self.channels = 2 * self.n_heads * config.head_width
        self.dropout = Dropout(config.attention.dropout, "attention")

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of content scores and weighted values, and of products with the position table."""
        position_macs = self.channels * self.n_rows * tokens.n
        return self.pattern.cost(tokens, self.channels, self.n_heads) + Cost(
            attention_macs=position_macs, visible_attention_macs=position_macs
        )

    def forward(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        sequence: SequenceMetadata,
        positions: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return [B, N, T, H]. positions: queries and keys [N, R, H] projected from the position table."""
        q_NRH, k_NRH = positions
        q_BNTH = q_BNTH * self.scale
        key_position_scores_BNSR = (k_BNSH * self.scale) @ q_NRH.transpose(-1, -2)
        rng_keys_BNT = self.dropout.make_head_rng_keys(sequence, q_BNTH.shape[1])

        def attend(queries: slice) -> Tensor:
            distances_TS = -sequence.relative_positions(queries)  # query − key
            q_chunk_BNTH = q_BNTH[:, :, queries]
            key_positions, query_positions = (
                self.rows(d).expand(*q_BNTH.shape[:2], -1, -1) for d in (distances_TS, distances_TS.T)
            )
            content_to_position = (q_chunk_BNTH @ k_NRH.transpose(-1, -2)).gather(-1, key_positions)
            position_to_content = key_position_scores_BNSR.gather(-1, query_positions)
            scores_BNTS = q_chunk_BNTH @ k_BNSH.transpose(-1, -2) + content_to_position
            scores_BNTS = scores_BNTS + position_to_content.transpose(-1, -2)
            chunk_keys = None if rng_keys_BNT is None else rng_keys_BNT[:, :, queries]
            mask_B1TS = sequence.mask(self.pattern, queries=queries)
            probabilities_BNTS = compute_probabilities(scores_BNTS, mask_B1TS, self.dropout.rate, chunk_keys)
            return zero_blind_queries(probabilities_BNTS @ v_BNSH, mask_B1TS)

        return attend_in_chunks(attend, q_BNTH, k_BNSH.shape[2], "disentangled")


def _clamp_to_row(distances: Tensor, farthest: int) -> Tensor:
    """Return the row of the table of positions for each distance."""
    return (distances + farthest).clamp(0, 2 * farthest - 1)


def _bucket_to_row(distances: Tensor, n: int, farthest: int) -> Tensor:
    """Return the row of the table of positions for each distance."""
    return (assign_log_buckets(distances, n, farthest) + n).clamp(0, 2 * n - 1)


class RelativePositionTable(nn.Module):
    """A learned vector for each relative position, one table [R, D] for all layers."""

    tp_plan = (("table", "replicated_partial_grad"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        rows = 2 * require_variant(config.position, DebertaPositionConfig, "model.position").max_distance
        self.table = Embedding(rows, config.d_model, initial("relative", rows, config.d_model))

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """Return the table of distances [R, D]."""
        return self.table.weight


POSITIONS.register("deberta")(PositionEncoding(score_bias=RelativePositionTable))


def assign_log_buckets(distances: Tensor, n_buckets: int, farthest: int) -> Tensor:
    """Return the signed bucket of each distance, int64 within ± n_buckets for distances within ± farthest.

    Half of the buckets hold one distance each, the others exponentially growing ranges up to `farthest`. Unlike T5's,
    logarithms are rounded up.
    """
    exact = n_buckets // 2
    # In float32 and in this order, as the released code computes it: distances at a range's edge depend on it.
    ranges = torch.log(distances.abs().clamp(min=1).float() / exact) / torch.log(
        torch.full((), (farthest - 1) / exact, dtype=torch.float32, device=distances.device)
    )
    logarithmic = torch.ceil(ranges * (exact - 1)).long() + exact
    return torch.where(distances.abs() <= exact, distances, logarithmic * distances.sign())


class BucketedPositionTable(nn.Module):
    """A learned vector for each bucket, one normalised table [R, D] for all layers."""

    tp_plan = (("table", "replicated_partial_grad"), ("norm", "replicated_partial_grad"))

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, DebertaV2PositionConfig, "model.position")
        rows = 2 * options.buckets
        self.table = Embedding(rows, config.d_model, initial("relative", rows, config.d_model))
        self.norm = make_norm(config)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return 0: the norm runs once over the table, for all tokens and layers."""
        return Cost()

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """Return the table of distances [R, D]."""
        return self.norm(self.table.weight)


POSITIONS.register("deberta_v2")(PositionEncoding(score_bias=BucketedPositionTable))


class ShawCore(nn.Module):
    """Attention that adds a learned vector for the clipped distance to each key and value, shared by all heads."""

    tp_plan = (("", "replicated_partial_grad"), ("dropout", "local_shard_dropout"))

    cp_plan = "attention"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
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
