"""XLNet (Yang et al. 2019): predicts tokens in a random order, each from the tokens before it in that order.

It has no memory of earlier segments (section 2.4, Transformer-XL's recurrence).
"""

from collections.abc import Collection, Mapping, Sequence
from math import gcd
from typing import Any, Self

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.config.attention import TwoStreamAttentionConfig
from megatfm.cost import Cost, TokenCounts, sum_costs
from megatfm.layers.attention.two_stream import LocalAndFull, QueryStream, TwoStreamAttention
from megatfm.layers.dropout import Dropout
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.feed_forward import FFNS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.loss_terms import AuxiliaryCollector, BlockOutput
from megatfm.layers.norm import RESIDUALS, make_norm
from megatfm.layers.output_head import LMHead
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.base import (
    MODELS,
    Model,
    Output,
    list_sequence_fields,
    make_sequence,
    make_stack_view,
    require_field,
)
from megatfm.models.stack import unpack
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.transfer import keep_host_copy, to_host
from megatfm.split_points import CarrySpec, SplitPoint

# B batch, T tokens, Q queries, S keys, R relative positions, D model width

PREDICTED_FRACTION = 1 / 6
"""Share of tokens that the paper predicts; only these have queries."""

QUERY_MULTIPLE = TwoStreamAttentionConfig.query_multiple
"""The number of queries is a multiple of this, or of its common divisor with the row, so that the query stream can be
sharded like the row."""


@MODELS.register("xlnet")
class XLNet(Model):
    """A two-stream stack with a language-model head, or with heads of tasks, which read the content stream alone."""

    encoder: "TwoStreamStack | None"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        embedding = InputEmbedding(config, "encoder")
        self.encoder = TwoStreamStack(config, embedding)
        self.input_field = embedding.input_field
        self.runs_head = config.lm_head.name != "none"
        self.head = LMHead(config, embedding.tied_table(config), sparse=True) if self.runs_head else None
        self.add_heads(embedding.table)
        if config.extra_heads and self.encoder.query is not None:
            self.encoder.query.requires_grad_(False)  # no token is predicted, so it has no part in the loss
        predicted = () if config.extra_heads else ("order",)
        targets = () if config.extra_heads else ("targets",)
        # Attention compares segments, even if the embedding has none.
        self.accept(self.input_field, *list_sequence_fields(config), "segments", *predicted, targets=targets)
        self.split_points = [
            *self.encoder.split_points("encoder", has_queries=not config.extra_heads),
            *([SplitPoint("head", ("head",), ("query",))] if self.runs_head else []),
            *self.list_head_points("content"),
        ]

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        content: Tensor | None = None,
        query: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], none of them masked, or on the field of another embedding.

        targets [B, T]: the tokens to predict, −100 elsewhere; returns `losses` instead of `logits`. `fields` may hold
        positions, documents [B, T] and keys [B]: see SequenceMetadata; segments [B, T]: only their equality matters;
        order [B, T]: each token's rank in its document's order of prediction; all tokens see those of rank 0. content,
        query: from the previous pipeline stage. Further fields: those of heads of tasks.

        Without order, tokens see one another and themselves, as for fine-tuning. With it, logits at a token predict
        that token from those of lower ranks.
        """
        batch = self.read(tokens=tokens, targets=targets, keys=keys, **fields)
        sequence = make_sequence(batch, self.input_field, keys=keys)
        content_stream, query_stream = make_streams(batch, sequence)
        x_BTD, g_BQD, losses, logits = content, query, dict[str, Tensor](), None

        if self.encoder is not None:
            x_BTD, g_BQD, losses = self.encoder(
                batch[self.input_field], content_stream, query_stream, content=content, query=query
            )
        hidden = x_BTD if g_BQD is None else g_BQD
        if self.head is not None and self.runs_head:
            if targets is None:
                logits = self.head(hidden)
            else:
                losses["permutation"] = self.head(hidden, keep_host_copy(_gather_query_targets, targets))
        carry = {"content": x_BTD, "query": g_BQD}
        return self.output(batch, hidden, losses, logits, carry=carry, sequence=sequence)


class QueryEmbedding(nn.Module):
    """Learned vector that starts the query stream, the same for all tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model))
        initial = make_initialiser(config, "encoder")
        self.initial = {"weight": initial("embedding", 1, config.d_model)}
        self.roles = {"weight": "embedding"}

    def forward(self, like_BQ: Tensor) -> Tensor:
        """Return the vector for each query, [B, Q, D]. like_BQ: of the queries' shape."""
        return self.weight.expand(*like_BQ.shape, -1)


class TwoStreamStack(nn.Module):
    """Embedding and blocks. The content stream ends before the last block if there are queries."""

    cp_plan = "local"

    tp_plan = (
        ("query", "split_output"),
        ("query_dropout", "local_token_dropout"),
        ("norm", "sequence_parallel"),
        ("dropout", "local_token_dropout"),
    )

    def __init__(self, config: ModelConfig, embedding: InputEmbedding) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.embedding: InputEmbedding | None = embedding
        self.query: QueryEmbedding | None = QueryEmbedding(config)
        self.query_dropout = Dropout(config.dropout, "embedding")
        distinct = config.distinct_layers or config.n_layers
        self.layer_of_depth = [str(i * distinct // config.n_layers) for i in range(config.n_layers)]
        fractions = dict.fromkeys(self.layer_of_depth, 1.0)
        # The content stream skips the last depth, one of the uses of the last block.
        if not config.extra_heads:
            fractions[self.layer_of_depth[-1]] = 1 - 1 / self.layer_of_depth.count(self.layer_of_depth[-1])
        self.layers = nn.ModuleDict(
            {str(i): TwoStreamBlock(config, i, content_fraction=fractions[str(i)]) for i in range(distinct)}
        )
        self.skip_rates = [config.drop_path * i / max(config.n_layers - 1, 1) for i in range(config.n_layers)]
        make_table = POSITIONS.get(config.position.name).score_bias
        assert make_table is not None
        self.position = make_table(config, make_initialiser(config, "encoder"))
        self.norm = make_norm(config) if config.norm.has_final_norm else None
        self.dropout: Dropout | None = Dropout(config.dropout, "output")
        self.depths: Sequence[int] = range(config.n_layers)

    def forward(
        self,
        inputs: Tensor,
        content_stream: QueryStream,
        query_stream: QueryStream | None,
        *,
        content: Tensor | None = None,
        query: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Return hidden vectors of the content [B, T, D] and of the queries [B, Q, D], and the blocks' auxiliary
        losses.

        A stream that doesn't reach the end is None. inputs: the field that the embedding reads. content, query: from
        the previous pipeline stage.
        """
        x_BTD: Any = content
        g_BQD: Any = query
        losses = dict[str, Tensor]()
        if self.embedding is not None:
            x_BTD = self.embedding(inputs, content_stream.sequence)
        if self.query is not None and query_stream is not None:
            g_BQD = self.query_dropout(self.query(query_stream.sequence.positions), query_stream.sequence)
        table_RD = self.position(content_stream.sequence, False) if self.depths else None
        for depth in self.depths:
            block, skip_rate = self.layers[self.layer_of_depth[depth]], self.skip_rates[depth]
            is_last = query_stream is not None and depth == len(self.layer_of_depth) - 1
            layer_content = None if is_last else content_stream.at_layer(depth, skip_rate)
            layer_query = None if query_stream is None else query_stream.at_layer(depth, skip_rate)
            outputs = block(x_BTD, g_BQD, table_RD, layer_content, layer_query)
            (x_BTD, g_BQD), losses = unpack(block, outputs, losses)
        if self.dropout is not None:  # only in the stage that ends the stack
            if query_stream is None:
                x_BTD = self._finish(x_BTD, content_stream.sequence)
            else:
                g_BQD = self._finish(g_BQD, query_stream.sequence)
        return x_BTD, g_BQD, losses

    def stage(self, names: Collection[str]) -> Self | None:
        """Return a view that runs these split points only (names relative to the stack); None if there are none."""
        view = make_stack_view(self, names, ("embedding", "query"))
        if view is not None and "norm" not in names:
            view.dropout = None
        return view

    def split_points(self, path: str, *, has_queries: bool = True) -> list[SplitPoint]:
        """Return the split points of embedding, query, blocks and final norm.

        Stages exchange "content" [B, T, D] and, if tokens are predicted, "query" [B, Q, D].
        """
        content = {"content": CarrySpec("tokens", self.d_model)}
        query = {"query": CarrySpec("tokens", self.d_model, count_queries)} if has_queries else {}
        final_modules = (f"{path}.dropout",) if self.norm is None else (f"{path}.norm", f"{path}.dropout")
        streams, final_stream = content | query, query or content
        return [
            SplitPoint(f"{path}.embedding", (f"{path}.embedding",), writes=content),
            SplitPoint(f"{path}.query", (f"{path}.query", f"{path}.query_dropout"), writes=query),
            *(
                SplitPoint(
                    f"{path}.layers.{depth}", (f"{path}.layers.{name}", f"{path}.position"), tuple(streams), streams
                )
                for depth, name in enumerate(self.layer_of_depth)
            ),
            SplitPoint(f"{path}.norm", final_modules, tuple(final_stream), final_stream),
        ]

    def _finish(self, hidden: Tensor, sequence: SequenceMetadata) -> Tensor:
        normed = hidden if self.norm is None else self.norm(hidden)
        assert self.dropout is not None
        dropped: Tensor = self.dropout(normed, sequence)
        return dropped


class TwoStreamBlock(nn.Module):
    """Transformer block of both streams, with the same weights; both attend to the content.

    content_fraction: share of the block's uses that process the content stream, if tokens are predicted.
    """

    def __init__(self, config: ModelConfig, depth: int, *, content_fraction: float) -> None:
        super().__init__()
        self.depth, self.kind, config = depth, config.get_layer_type(depth), config.layer_config(depth)
        self.content_fraction, self.has_queries = content_fraction, not config.extra_heads
        initial, residual = make_initialiser(config, "encoder"), RESIDUALS.get(config.norm.placement)
        self.attn_residual = residual(config, "attention residual", "encoder")
        self.attn = TwoStreamAttention(config, initial)
        self.ffn_residual = residual(config, "ffn residual", "encoder")
        self.ffn = FFNS.get(config.ffn.name)(config, initial)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the mean cost of a use, over the queries of both streams."""
        fraction = PREDICTED_FRACTION if tokens.target_fraction is None else tokens.target_fraction
        predicted = fraction if self.has_queries else 0.0
        queries = tokens.with_count(tokens.n * (predicted + self.content_fraction))
        sublayers = sum_costs((self.attn_residual, self.ffn_residual, self.ffn), queries)
        return sublayers + self.attn.cost(queries, tokens.n)

    def forward(
        self,
        x_BTD: Tensor,
        g_BQD: Tensor | None,
        table_RD: Tensor,
        content_stream: QueryStream | None,
        query_stream: QueryStream | None,
    ) -> tuple[Tensor | None, Tensor | None] | BlockOutput:
        """Return the content and the query stream after the block; None for a stream that doesn't pass through it."""
        extras = AuxiliaryCollector()
        keys_values = self.attn.project_content(self.attn_residual.input_norm(x_BTD), table_RD)

        def run_stream(y_BQD: Tensor | None, stream: QueryStream | None) -> Tensor | None:
            if y_BQD is None or stream is None:
                return None
            z_BQD = self.attn(self.attn_residual.input_norm(y_BQD), keys_values, stream)
            y_BQD = self.attn_residual.add(y_BQD, z_BQD, stream.sequence)
            z_BQD = extras.unwrap("ffn", self.ffn(self.ffn_residual.input_norm(y_BQD), stream.sequence))
            return self.ffn_residual.add(y_BQD, z_BQD, stream.sequence)

        return extras.wrap((run_stream(x_BTD, content_stream), run_stream(g_BQD, query_stream)))


def make_streams(batch: Mapping[str, Tensor], sequence: SequenceMetadata) -> tuple[QueryStream, QueryStream | None]:
    """Return the content stream, whose tokens see ranks up to their own, and the query stream of the predicted tokens,
    which sees lower ranks. Without order and targets, all tokens see one another, and there are no queries."""
    targets, row_positions = batch.get("targets"), batch.get("full_row_positions")
    zeros = torch.zeros_like(sequence.positions)
    full_zeros = zeros if row_positions is None else torch.zeros_like(row_positions)

    def local_and_full(name: str) -> LocalAndFull:
        if name not in batch:
            return LocalAndFull(zeros, full_zeros)
        full = batch[name] if row_positions is None else require_field(batch, f"full_row_{name}")
        return LocalAndFull(batch[name], full)

    segments = local_and_full("segments")
    if "order" not in batch and targets is None:
        return make_content_stream(sequence, segments), None
    indices_BQ = torch.arange(zeros.shape[1], device=zeros.device).expand_as(zeros)
    if targets is not None:
        indices_BQ = find_query_indices(targets)
    return make_two_streams(sequence, segments, local_and_full("order"), indices_BQ, targets)


def make_two_streams(
    sequence: SequenceMetadata,
    segments: LocalAndFull,
    order: LocalAndFull,
    indices_BQ: Tensor,
    targets_BT: Tensor | None,
) -> tuple[QueryStream, QueryStream]:
    """Return the content stream of all local tokens, which see ranks up to their own, and the query stream of the
    tokens at `indices_BQ`, which see lower ranks."""
    query_order = LocalAndFull(order.local.gather(1, indices_BQ) - 1, order.full)
    # Queries must not drop the same elements as the content of their token.
    keys = None if sequence.rng_keys is None else ~sequence.rng_keys
    documents_BQ = sequence.non_padding_mask.long().gather(1, indices_BQ) - 1  # 0, or −1 for padding
    if targets_BT is not None:  # queries without a target are padding
        documents_BQ = documents_BQ.masked_fill(targets_BT.gather(1, indices_BQ) == IGNORE, -1)
    query_sequence = SequenceMetadata(sequence.positions.gather(1, indices_BQ), documents_BQ, rng_keys=keys)
    row_indices_BQ = sequence.indices[indices_BQ]
    query_sequence.cached("indices", lambda: row_indices_BQ)
    documents = get_local_and_full_documents(sequence)
    if documents is not None:
        documents = LocalAndFull(documents.local.gather(1, indices_BQ), documents.full)
    segments_BQ = segments.local.gather(1, indices_BQ)
    query_segments = LocalAndFull(segments_BQ, segments.full)
    query = QueryStream(query_sequence, row_indices_BQ, query_segments, documents, query_order)
    return make_content_stream(sequence, segments, order), query


def make_content_stream(
    sequence: SequenceMetadata, segments: LocalAndFull, order: LocalAndFull | None = None
) -> QueryStream:
    """Return the content stream of all local tokens. order: None: tokens see one another."""
    row_indices_BT = sequence.indices.expand_as(segments.local)
    return QueryStream(sequence, row_indices_BT, segments, get_local_and_full_documents(sequence), order)


def get_local_and_full_documents(sequence: SequenceMetadata) -> LocalAndFull | None:
    """Return the documents of local tokens and of full rows; None if all tokens see one another."""
    documents = sequence.document_ids()
    return None if documents is None else LocalAndFull(*documents)


def find_query_indices(targets_BT: Tensor) -> Tensor:
    """Return the token indices of the query stream [B, Q]: those with targets, padded with others to equal numbers."""
    targets_first_BT = (targets_BT == IGNORE).long().argsort(dim=1, stable=True)
    return targets_first_BT[:, : count_queries({"targets": targets_BT})]


def _gather_query_targets(targets_BT: Tensor) -> Tensor:
    """Return the targets of the query stream [B, Q]."""
    return targets_BT.gather(1, find_query_indices(targets_BT))


def count_queries(inputs: Mapping[str, Tensor]) -> int:
    """Return Q: the largest number of targets of a row, rounded up to a multiple of `QUERY_MULTIPLE`."""
    targets_BT = to_host(inputs["targets"])
    multiple = gcd(targets_BT.shape[1], QUERY_MULTIPLE)
    max_targets = max([1, *(targets_BT != IGNORE).sum(1).tolist()])
    return -(-max_targets // multiple) * multiple
