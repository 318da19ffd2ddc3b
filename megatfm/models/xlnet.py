"""XLNet (Yang et al. 2019): tokens are predicted in a random order, each from those that come before it in that order.

The memory of earlier segments (section 2.4, Transformer-XL's recurrence) is not here: a row is all that is seen.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, Tokens, costs_of
from megatfm.layers.attention.two_stream import Both, Stream, TwoStreamAttention
from megatfm.layers.dropout import Dropout
from megatfm.layers.embedding import Embedding
from megatfm.layers.extra import Extra, Extras
from megatfm.layers.ffn import FFNS
from megatfm.layers.head import Head
from megatfm.layers.initialisation import initialiser
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS
from megatfm.layers.residual import RESIDUALS
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import sequence_metadata
from megatfm.models.steps import Field, ForwardPass, ModelStep, ModelSteps
from megatfm.models.two_streams import everywhere, n_queries, places, two_streams

# B batch, T tokens, Q queries, S keys, R relative positions, D model width

PREDICTED_SHARE = 1 / 6
"""Of tokens, as the paper has it: these alone have queries."""


@MODELS.register("xlnet")
class XLNet(nn.Module):
    """A stack with two streams and a head over the vocabulary, if it has one."""

    context = "alone"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TwoStreamStack(config)
        has_head = config.head.name != "none"
        self.head = Head(config, self.encoder.embedding.tied_table(config), sparse=True) if has_head else None
        head = [ModelStep("head", self._head, uses=("head",), reads=("query",))] if self.head else []
        self.steps = ModelSteps([*self.encoder.steps(), *head])

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        order: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], of which none is masked, or on what else its embedding reads.

        positions, documents [B, T], keys [B]: as in SequenceMetadata. segments [B, T]: any numbers, only their
        equality matters. order [B, T]: each token's rank in the order of prediction of its document; those of rank 0
        are given, and all see them. targets [B, T]: the tokens that are predicted, −100 elsewhere; gives `losses`
        instead of `logits`.

        Without order, tokens see one another and themselves, as for fine-tuning. With it, the logits at a token are
        the prediction of that very token from those of lower ranks.
        """
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments, "order": order,
            "targets": targets, "keys": keys,
        }  # fmt: skip
        batch = ForwardPass({**inputs, **fields})
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output("query" if "query" in batch.carry else "content")

    def _head(self, batch: ForwardPass) -> None:
        assert self.head is not None
        targets = batch.get("targets")
        if targets is None:
            batch.logits = self.head(batch.carry.get("query", batch.carry["content"]))
        else:
            places_BQ = places(targets)
            batch.losses["permutation"] = self.head(batch.carry["query"], targets.gather(1, places_BQ))


class Query(nn.Module):
    """The learned vector with which the query stream starts; it stands for any token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model))
        initial = initialiser(config, "encoder")
        self.initial, self.roles = (
            {"weight": initial("embedding", 1, config.d_model)},
            {"weight": "embedding"},
        )

    def forward(self, like_BQ: Tensor) -> Tensor:
        """[B, Q, D]."""
        return self.weight.expand(*like_BQ.shape, -1)


class TwoStreamStack(nn.Module):
    """Embedding and blocks. The content stream ends before the last block, where only queries go on."""

    context = "alone"

    plan = (
        ("query", "sequence output"),
        ("query_dropout", "keys of own tokens"),
        ("norm", "sequence"),
        ("dropout", "keys of own tokens"),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.embedding = Embedding(config, "encoder")
        self.reads = self.embedding.reads
        self.query = Query(config)
        self.query_dropout = Dropout(config.dropout, "embedding")
        distinct = config.distinct_layers or config.n_layers
        self.layers = nn.ModuleDict(
            {str(i): TwoStreamBlock(config, i, queries_only=i == distinct - 1) for i in range(distinct)}
        )
        self.order = [str(i * distinct // config.n_layers) for i in range(config.n_layers)]
        self.skip_rates = [config.drop_path * i / max(config.n_layers - 1, 1) for i in range(config.n_layers)]
        make_table = POSITIONS.get(config.position.name).bias
        assert make_table is not None
        self.position = make_table(config, initialiser(config, "encoder"))
        self.norm = make_norm(config) if config.norm.ends_stack else None
        self.dropout = Dropout(config.dropout, "output")

    def steps(self) -> Iterator[ModelStep]:
        """The carry's "content" [B, T, D] and, where something is predicted, its "query" [B, Q, D]."""
        content = {"content": Field("tokens", self.d_model)}
        query = {"query": Field("tokens", self.d_model, n_queries)}
        yield ModelStep(
            "encoder.embedding", self.embedding, self._into_embedding, ("encoder.embedding",), writes=content
        )
        start = ("encoder.query", "encoder.query_dropout")
        yield ModelStep("encoder.query", self._start, uses=start, writes=query)
        for depth, name in enumerate(self.order):
            yield ModelStep(
                f"encoder.layers.{depth}",
                self.layers[name],
                partial(self._into_block, depth),
                (f"encoder.layers.{name}", "encoder.position"),
                ("content", "query"),
                content | query,
            )
        finish = ("encoder.dropout",) if self.norm is None else ("encoder.norm", "encoder.dropout")
        yield ModelStep("encoder.norm", self._finish, uses=finish, reads=("query",), writes=query)

    def _streams(self, batch: ForwardPass) -> tuple[Stream, Stream | None]:
        return batch.once("streams", lambda: self._make_streams(batch))

    def _make_streams(self, batch: ForwardPass) -> tuple[Stream, Stream | None]:
        """The content stream sees tokens up to its own rank, and so itself; the query stream, at `places`, lower ranks.
        Without order and targets all see all, and nothing is predicted."""
        targets, of_row = batch.get("targets"), batch.get("row_positions")
        sequence = sequence_metadata(
            batch[self.reads],
            batch.get("positions"),
            batch.get("documents"),
            rng_keys_B=batch.get("keys"),
            of_row=batch.of_row(),
        )
        zeros = torch.zeros_like(sequence.positions)
        zeros_of_row = zeros if of_row is None else torch.zeros_like(of_row)

        def field(name: str) -> Both:
            here = batch.get(name)
            if here is None:
                return Both(zeros, zeros_of_row)
            return Both(here, here if of_row is None else batch[f"row_{name}"])

        segments = field("segments")
        if batch.get("order") is not None or targets is not None:
            every_BQ = torch.arange(zeros.shape[1], device=zeros.device).expand_as(zeros)
            numbers_BQ = every_BQ if targets is None else places(targets)
            return two_streams(sequence, segments, field("order"), numbers_BQ, targets)
        return everywhere(sequence, segments), None

    def _is_last(self, depth: int) -> bool:
        return depth == len(self.order) - 1

    def _into_embedding(self, batch: ForwardPass) -> Sequence[Any]:
        return batch[self.reads], self._streams(batch)[0].sequence

    def _start(self, batch: ForwardPass) -> None:
        query = self._streams(batch)[1]
        if query is not None:
            batch.carry["query"] = self.query_dropout(self.query(query.sequence.positions), query.sequence)

    def _into_block(self, depth: int, batch: ForwardPass) -> Sequence[Any]:
        content, query = self._streams(batch)
        skip_rate = self.skip_rates[depth]
        return (
            batch.carry["content"],
            batch.carry.get("query"),
            batch.once("relative positions", lambda: self.position(content.sequence, False)),
            None if query is not None and self._is_last(depth) else content.at_layer(depth, skip_rate),
            None if query is None else query.at_layer(depth, skip_rate),
        )

    def _finish(self, batch: ForwardPass) -> None:
        content, query = self._streams(batch)
        part, sequence = ("content", content.sequence) if query is None else ("query", query.sequence)
        hidden = batch.carry[part] if self.norm is None else self.norm(batch.carry[part])
        batch.carry[part] = self.dropout(hidden, sequence)


class TwoStreamBlock(nn.Module):
    """A transformer block that both streams go through with the same weights; both look at the content alone.

    queries_only: where something is predicted, the content stream has ended before.
    """

    def __init__(self, config: ModelConfig, depth: int, *, queries_only: bool) -> None:
        super().__init__()
        self.depth, self.kind, config = depth, config.kind(depth), config.at(depth)
        self.queries_only = queries_only
        initial, residual = initialiser(config, "encoder"), RESIDUALS.get(config.norm.placement)
        self.attn_residual = residual(config, "attention residual", "encoder")
        self.attn = TwoStreamAttention(config, initial)
        self.ffn_residual = residual(config, "ffn residual", "encoder")
        self.ffn = FFNS.get(config.ffn.name)(config, initial)

    def cost(self, tokens: Tokens) -> Cost:
        """Of the queries of both streams; those of the content have ended before the last block."""
        share = PREDICTED_SHARE if tokens.predicted is None else tokens.predicted
        queries = tokens.of(tokens.n * (share + (not self.queries_only)))
        return costs_of((self.attn_residual, self.ffn_residual, self.ffn), queries) + self.attn.cost(
            queries, tokens.n
        )

    def forward(
        self,
        x_BTD: Tensor,
        g_BQD: Tensor | None,
        table_RD: Tensor,
        content: Stream | None,
        query: Stream | None,
    ) -> tuple[Tensor | None, Tensor | None] | Extra:
        """The content and the query stream after the block, each where it goes through."""
        extras = Extras()
        seen = self.attn.seen(self.attn_residual.before(x_BTD), table_RD)

        def through(y_BQD: Tensor | None, stream: Stream | None) -> Tensor | None:
            if y_BQD is None or stream is None:
                return None
            z_BQD = self.attn(self.attn_residual.before(y_BQD), seen, stream)
            y_BQD = self.attn_residual.after(y_BQD, z_BQD, stream.sequence)
            z_BQD = extras.take("ffn", self.ffn(self.ffn_residual.before(y_BQD), stream.sequence))
            return self.ffn_residual.after(y_BQD, z_BQD, stream.sequence)

        made = through(x_BTD, content), through(g_BQD, query)
        return extras.beside(made)
