"""XLNet's attention (Yang et al. 2019, sections 2.3 to 2.5): queries of two streams, keys and values of one.

Scores are Transformer-XL's (Dai et al. 2019, section 3.3), each of their terms with a bias of its own, and one more for
whether query and key are in the same segment.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, module_cost, total_cost
from megatfm.layers.attention.patterns.local import require_full
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.reference import attend_in_chunks, probabilities, unless_blind

# B batch, Q queries, S keys, D model width, N heads, H head width, R relative positions


class LocalAndFull(NamedTuple):
    """A field at the tokens that are here, or at queries, and at all tokens of their rows."""

    local: Tensor
    full: Tensor


class PairwiseInputs(NamedTuple):
    """Inputs for pairs of queries and keys, each [B, 1, q, S].

    mask: true where a query may look; None: everywhere. distances: the row of the table of relative positions, for
    query − key. segments: 0 where both are in the same segment, else 1.
    """

    mask: Tensor | None
    distances: Tensor
    segments: Tensor


@dataclass(frozen=True)
class QueryStream:
    """Queries of a stream: their positions, and what each of them may see of the row.

    sequence: of the queries, for dropout. places int64 [B, Q]: in their rows. A query sees the tokens of its document
    whose rank in the order is no higher than the number that it has there; None: this hides nothing.
    """

    sequence: SequenceMetadata
    places_BQ: Tensor
    segments: LocalAndFull
    documents: LocalAndFull | None
    order: LocalAndFull | None

    def at_layer(self, depth: int, skip_rate: float) -> Self:
        """Return a copy with one layer's random keys."""
        return replace(self, sequence=self.sequence.at_layer(depth, skip_rate))

    def pairs(self, rows: slice) -> PairwiseInputs:
        """Inputs for some queries with all tokens; for all queries, computed once for all layers."""
        if len(range(*rows.indices(self.places_BQ.shape[1]))) < self.places_BQ.shape[1]:
            return self._pairs(rows)
        return self.sequence.cached("pairs of a stream", lambda: self._pairs(rows))

    def _pairs(self, rows: slice) -> PairwiseInputs:
        full_segments = self.segments.full
        places_S = torch.arange(full_segments.shape[1], device=full_segments.device)
        distances_BQS = self.places_BQ[:, rows, None] - places_S + full_segments.shape[1] - 1
        segments_BQS = (self.segments.local[:, rows, None] != full_segments[:, None]).long()
        masks = [of.full[:, None] <= of.local[:, rows, None] for of in (self.order,) if of]
        masks += [of.full[:, None] == of.local[:, rows, None] for of in (self.documents,) if of]
        mask_B1QS = reduce(torch.logical_and, masks)[:, None] if masks else None
        return PairwiseInputs(mask_B1QS, distances_BQS[:, None], segments_BQS[:, None])


@dataclass(frozen=True)
class ContentKeysValues:
    """Keys and values [B, N, S, H] of the content, and keys [N, R, H] of the relative positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor


class GatherKV(nn.Module):
    """Keys and values of the tokens here → those of the whole row: the seam at which context parallelism takes over."""

    cp_plan = "gather_kv"

    def forward(self, k_BNSH: Tensor, v_BNSH: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Both as they are. length: of rows."""
        return k_BNSH, v_BNSH


class TwoStreamAttention(nn.Module):
    """`content_keys_values` is called once a layer; the module is then called for each stream with its queries.

    The paper's u, v and b are the biases of content, position and segment; its s₊ and s₋ are `segments`.
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
        self.gather_kv = GatherKV()
        self.content = nn.Identity()  # the seam at which tensor parallelism gathers what both streams look at
        self.wq = Linear(d, width, initial("query", d, width))
        self.wk = Linear(d, width, initial("key", d, width))
        self.wv = Linear(d, width, initial("value", d, width))
        self.wo = Linear(width, d, initial("out", width, d))
        self.wk_position = Linear(d, width, initial("key", d, width))
        self.content_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.segment_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.segments = nn.Parameter(torch.empty(2, heads, self.head_dim))
        # Biases are initialised like all weights, as in the released code; they are added to queries, and don't decay.
        biases = ("content_bias", "position_bias", "segment_bias")
        relative_init = initial("relative", 2, width)
        self.initial = dict.fromkeys((*biases, "segments"), relative_init)
        self.roles = dict.fromkeys(biases, "vector") | {"segments": "embedding"}
        self.dropout = Dropout(config.attention.dropout, "attention")

    def cost(self, tokens: TokenCounts, content: float = 0.0) -> Cost:
        """tokens: the queries of all streams. content: tokens that they look at, left out as many.

        Scores are those of content and of 2 content − 1 distances, and of whether two segments are the same.
        """
        content = content or tokens.n
        width, distances = self.wo.weight.shape[1], 2 * content - 1
        biases = self.content_bias.numel() * 3
        parts = total_cost((self.wq, self.wo), tokens) + total_cost(
            (self.wk, self.wv), tokens.with_count(content)
        )
        products = width * tokens.n * (2 * content + distances)
        return (
            parts
            + module_cost(self.wk_position, tokens.with_count(distances))
            + Cost(self.segments.numel() * tokens.n, biases * tokens.n, products, products)
        )

    def content_keys_values(self, content_BSD: Tensor, table_RD: Tensor) -> ContentKeysValues:
        """Keys and values of both streams' queries; table: of relative positions."""
        content_BSD, positions_RD = self.content(content_BSD), table_RD.to(content_BSD.dtype)
        keys, values = self._heads(self.wk, content_BSD), self._heads(self.wv, content_BSD)
        keys, values = self.gather_kv(keys, values, (len(table_RD) + 1) // 2)
        return ContentKeysValues(keys, values, self._heads(self.wk_position, positions_RD))

    def forward(self, x_BQD: Tensor, content: ContentKeysValues, stream: QueryStream) -> Tensor:
        """[B, Q, D]."""
        q_BNQH = self._heads(self.wq, x_BQD) * self.scale
        rng_keys_BNQ = self.dropout.head_rng_keys(stream.sequence, q_BNQH.shape[1])

        def attend(rows: slice) -> Tensor:
            scores_BNQS, mask_B1QS = self._scores(q_BNQH[:, :, rows], content, stream.pairs(rows))
            chunk_keys = None if rng_keys_BNQ is None else rng_keys_BNQ[:, :, rows]
            shares_BNQS = probabilities(scores_BNQS, mask_B1QS, self.dropout.rate, chunk_keys)
            return unless_blind(shares_BNQS @ content.values, mask_B1QS)

        heads_BNQH = attend_in_chunks(attend, q_BNQH, content.keys.shape[2], "of two streams")
        return self.wo(heads_BNQH.transpose(1, 2).flatten(2))

    def _scores(
        self, q_BNQH: Tensor, content: ContentKeysValues, pairs: PairwiseInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled scores of some queries, and their mask."""
        content_queries, position_queries, segment_queries = (
            q_BNQH + self.scale * bias[:, None]
            for bias in (self.content_bias, self.position_bias, self.segment_bias)
        )
        by_distance_BNQR = position_queries @ content.positions.transpose(-1, -2)
        by_segment_BNQ2 = segment_queries @ self.segments.permute(1, 2, 0)
        distances, segments = (
            index.expand(-1, q_BNQH.shape[1], -1, -1) for index in (pairs.distances, pairs.segments)
        )
        scores_BNQS = content_queries @ content.keys.transpose(-1, -2) + by_distance_BNQR.gather(
            -1, distances
        )
        return scores_BNQS + by_segment_BNQ2.gather(-1, segments), pairs.mask

    def _heads(self, projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
