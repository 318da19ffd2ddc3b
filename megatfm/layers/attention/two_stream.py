"""XLNet's attention (Yang et al. 2019, sections 2.3 to 2.5): queries of two streams attend to the content stream.

Scores have Transformer-XL's content and position terms (Dai et al. 2019, section 3.3) and a term for whether query and
key are in the same segment; each term has its own query bias.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, compute_module_cost, sum_costs
from megatfm.layers.attention.patterns.local import require_full
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata, selects_all
from megatfm.ops.attention.reference import attend_in_chunks, compute_probabilities, zero_blind_queries

# B batch, Q queries, S keys, D model width, N heads, H head width, R relative positions


class LocalAndFull(NamedTuple):
    """Values of a field at this rank's tokens (or the queries), and at all tokens of the full rows."""

    local: Tensor
    full: Tensor


class PairwiseInputs(NamedTuple):
    """Inputs for pairs of queries and keys, each [B, 1, Q, S].

    mask: true where a query sees the key; None: everywhere. distances: the row in the relative position table for
    query − key. segments: 0 in the same segment, else 1.
    """

    mask: Tensor | None
    distances: Tensor
    segments: Tensor


@dataclass(frozen=True)
class QueryStream:
    """The queries of one stream, and which tokens of the row each of them sees.

    sequence: metadata of the queries, for dropout. indices_BQ: int64 [B, Q], the queries' token indices in their rows.
    A query sees a token if both are in the same document and order.full ≤ order.local; None: no restriction.
    """

    sequence: SequenceMetadata
    indices_BQ: Tensor
    segments: LocalAndFull
    documents: LocalAndFull | None
    order: LocalAndFull | None

    def at_layer(self, depth: int, skip_rate: float) -> Self:
        """Return a copy with the random keys of one layer."""
        return replace(self, sequence=self.sequence.at_layer(depth, skip_rate))

    def make_pairs(self, queries: slice) -> PairwiseInputs:
        """Return inputs for a slice of queries with all tokens; those of all queries are cached for all layers."""
        if selects_all(queries, self.indices_BQ.shape[1]):
            return self.sequence.cached("pairs of a stream", lambda: self._compute_pairs(queries))
        return self._compute_pairs(queries)

    def _compute_pairs(self, queries: slice) -> PairwiseInputs:
        full_segments = self.segments.full
        indices_S = torch.arange(full_segments.shape[1], device=full_segments.device)
        distances_BQS = self.indices_BQ[:, queries, None] - indices_S + full_segments.shape[1] - 1
        segments_BQS = (self.segments.local[:, queries, None] != full_segments[:, None]).long()
        masks = [field.full[:, None] <= field.local[:, queries, None] for field in (self.order,) if field]
        masks += [field.full[:, None] == field.local[:, queries, None] for field in (self.documents,) if field]
        mask_B1QS = reduce(torch.logical_and, masks)[:, None] if masks else None
        return PairwiseInputs(mask_B1QS, distances_BQS[:, None], segments_BQS[:, None])


@dataclass(frozen=True)
class ContentKeysValues:
    """Keys and values [B, N, S, H] of the content, and keys [N, R, H] of the relative positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor


class KVGather(nn.Module):
    """Identity; context parallelism replaces it by an all-gather of keys and values over the row's ranks."""

    cp_plan = "gather_kv"

    def forward(self, k_BNSH: Tensor, v_BNSH: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged. length: tokens in a full row."""
        return k_BNSH, v_BNSH


class TwoStreamAttention(nn.Module):
    """Attention of both streams: call `project_content` once a layer, then the module once for each stream.

    `content_bias`, `position_bias`, `segment_bias` are the paper's u, v, b; `segments` are its s₊ and s₋.
    """

    tp_plan = (
        ("", "gather_input_shard_heads"),
        ("content", "gather_output"),
        ("w[qkv]", "colwise"),
        ("wk_position", "colwise"),
        ("dropout", "local_shard_dropout"),
        ("wo", "rowwise"),
    )

    cp_plan = "local"
    attends_in_chunks = True

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        require_full(config)
        d, heads, self.head_dim = config.d_model, config.attention.n_heads, config.head_width
        width = heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.gather_kv = KVGather()
        self.content = nn.Identity()  # tensor parallelism gathers the content stream here
        self.wq = Linear(d, width, initial("query", d, width))
        self.wk = Linear(d, width, initial("key", d, width))
        self.wv = Linear(d, width, initial("value", d, width))
        self.wo = Linear(width, d, initial("out", width, d))
        self.wk_position = Linear(d, width, initial("key", d, width))
        self.content_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.segment_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.segments = nn.Parameter(torch.empty(2, heads, self.head_dim))
        # Biases are initialised like weights, as in the released code, but have no weight decay, like other biases.
        biases = ("content_bias", "position_bias", "segment_bias")
        relative_init = initial("relative", 2, width)
        self.initial = dict.fromkeys((*biases, "segments"), relative_init)
        self.roles = dict.fromkeys(biases, "vector") | {"segments": "embedding"}
        self.dropout = Dropout(config.attention.dropout, "attention")

    def cost(self, tokens: TokenCounts, content: float = 0.0) -> Cost:
        """Return the cost for `tokens` queries of both streams. content: number of keys; 0: as many as queries.

        Scores are computed with `content` keys, 2 · content − 1 relative positions and two segment vectors.
        """
        content = content or tokens.n
        width, distances = self.wo.weight.shape[1], 2 * content - 1
        biases = self.content_bias.numel() * 3
        projection_cost = sum_costs((self.wq, self.wo), tokens) + sum_costs(
            (self.wk, self.wv), tokens.with_count(content)
        )
        score_macs = width * tokens.n * (2 * content + distances)
        return (
            projection_cost
            + compute_module_cost(self.wk_position, tokens.with_count(distances))
            + Cost(self.segments.numel() * tokens.n, biases * tokens.n, score_macs, score_macs)
        )

    def project_content(self, content_BSD: Tensor, table_RD: Tensor) -> ContentKeysValues:
        """Project the content stream to keys and values, and the relative position table [R, D] to keys."""
        content_BSD, positions_RD = self.content(content_BSD), table_RD.to(content_BSD.dtype)
        keys, values = self._project_heads(self.wk, content_BSD), self._project_heads(self.wv, content_BSD)
        keys, values = self.gather_kv(keys, values, (len(table_RD) + 1) // 2)
        return ContentKeysValues(keys, values, self._project_heads(self.wk_position, positions_RD))

    def forward(self, x_BQD: Tensor, content: ContentKeysValues, stream: QueryStream) -> Tensor:
        """Return the attention output of one stream's queries, [B, Q, D]."""
        q_BNQH = self._project_heads(self.wq, x_BQD) * self.scale
        rng_keys_BNQ = self.dropout.make_head_rng_keys(stream.sequence, q_BNQH.shape[1])

        def attend(queries: slice) -> Tensor:
            scores_BNQS, mask_B1QS = self._compute_scores(q_BNQH[:, :, queries], content, stream.make_pairs(queries))
            chunk_keys = None if rng_keys_BNQ is None else rng_keys_BNQ[:, :, queries]
            probabilities_BNQS = compute_probabilities(scores_BNQS, mask_B1QS, self.dropout.rate, chunk_keys)
            return zero_blind_queries(probabilities_BNQS @ content.values, mask_B1QS)

        heads_BNQH = attend_in_chunks(attend, q_BNQH, content.keys.shape[2], "two-stream")
        return self.wo(heads_BNQH.transpose(1, 2).flatten(2))

    def _compute_scores(
        self, q_BNQH: Tensor, content: ContentKeysValues, pairs: PairwiseInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Return scaled scores [B, N, Q, S] and the mask."""
        content_queries, position_queries, segment_queries = (
            q_BNQH + self.scale * bias[:, None] for bias in (self.content_bias, self.position_bias, self.segment_bias)
        )
        by_distance_BNQR = position_queries @ content.positions.transpose(-1, -2)
        by_segment_BNQ2 = segment_queries @ self.segments.permute(1, 2, 0)
        distances, segments = (index.expand(-1, q_BNQH.shape[1], -1, -1) for index in (pairs.distances, pairs.segments))
        scores_BNQS = content_queries @ content.keys.transpose(-1, -2) + by_distance_BNQR.gather(-1, distances)
        return scores_BNQS + by_segment_BNQ2.gather(-1, segments), pairs.mask

    def _project_heads(self, projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
