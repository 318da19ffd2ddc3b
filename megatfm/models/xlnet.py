"""XLNet (Yang et al. 2019): tokens are predicted in a random order, each from those that come before it in that order.

The memory of earlier segments (section 2.4, Transformer-XL's recurrence) is not here: a row is all that is seen.
"""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention.two_stream import Stream, TwoStreamAttention
from megatfm.layers.dropout import Dropout
from megatfm.layers.embedding import Embedding
from megatfm.layers.ffn import FFN
from megatfm.layers.head import Head
from megatfm.layers.initialisation import initialiser
from megatfm.layers.norm import NORMS
from megatfm.layers.position import POSITIONS
from megatfm.layers.residual import RESIDUALS
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import layout_of
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.sequence import SequenceLayout

# B batch, T tokens, Q queries, S keys, R relative positions, D model width


@MODELS.register("xlnet")
class XLNet(nn.Module):
    """A stack with two streams and a head over the vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TwoStreamStack(config)
        tokens = self.encoder.embedding.tokens
        self.head = Head(config, tokens if config.tie_embeddings else None, sparse=True)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        order: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], of which none is masked.

        positions, documents [B, T], keys [B]: as in SequenceLayout. segments [B, T]: any numbers, only whether two are
        the same matters. order [B, T]: each token's rank in the order of prediction of its document; those of rank 0
        are given, and all see them. targets [B, T]: the tokens that are predicted, −100 elsewhere; gives `losses`
        instead of `logits`.

        Without order, tokens see one another and themselves, as for fine-tuning. With it, the logits at a token are
        the prediction of that very token from those of lower ranks.
        """
        layout = layout_of(tokens, positions, documents, keys_B=keys)
        segments = torch.zeros_like(tokens) if segments is None else segments
        if order is None and targets is None:
            content = _stream(
                layout, layout.indices.expand_as(tokens), segments, segments, layout.mask("full")
            )
            hidden_BTD, _ = self.encoder(tokens, layout, content, None)
            return Output(hidden_BTD, logits=self.head(hidden_BTD))
        order = torch.zeros_like(tokens) if order is None else order
        places_BQ = _places(tokens, targets)
        content, query = streams(layout, segments, order, places_BQ)
        _, hidden_BQD = self.encoder(tokens, layout, content, query)
        if targets is None:
            return Output(hidden_BQD, logits=self.head(hidden_BQD))
        return Output(hidden_BQD, losses={"permutation": self.head(hidden_BQD, targets.gather(1, places_BQ))})


class TwoStreamStack(nn.Module):
    """Embedding and blocks. The query stream starts from one learned vector, which stands for any token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        initial = initialiser(config, "encoder")
        self.embedding = Embedding(config, "encoder")
        self.query = nn.Parameter(torch.empty(config.d_model))
        self.initial, self.roles = {"query": initial("embedding", 1, config.d_model)}, {"query": "embedding"}
        self.query_dropout = Dropout(config.dropout, "embedding")
        distinct = config.distinct_layers or config.n_layers
        self.layers = nn.ModuleDict({str(i): TwoStreamBlock(config) for i in range(distinct)})
        self.order = [str(i * distinct // config.n_layers) for i in range(config.n_layers)]
        self.skip_rates = [config.drop_path * i / max(config.n_layers - 1, 1) for i in range(config.n_layers)]
        make_table = POSITIONS.get(config.position).bias
        assert make_table is not None
        self.position = make_table(config, initial)
        self.norm = NORMS.get(config.norm)(config.d_model, config.norm_eps) if config.has_final_norm else None
        self.dropout = Dropout(config.dropout, "output")

    def forward(
        self, tokens_BT: Tensor, layout: SequenceLayout, content: Stream, query: Stream | None
    ) -> tuple[Tensor, Tensor | None]:
        """The content stream [B, T, D], and if there is one the query stream [B, Q, D]; the last one is dropped out."""
        x_BTD = self.embedding(tokens_BT, layout)
        g_BQD = None
        if query is not None:
            g_BQD = self.query.to(x_BTD.dtype).expand(*query.layout.positions.shape, -1)
            g_BQD = self.query_dropout(g_BQD, query.layout)
        table_RD = self.position(layout, "full")
        for depth, (name, skip_rate) in enumerate(zip(self.order, self.skip_rates, strict=True)):
            x_BTD, g_BQD = self.layers[name](
                x_BTD,
                g_BQD,
                table_RD,
                content.at_layer(depth, skip_rate),
                None if query is None else query.at_layer(depth, skip_rate),
            )
        if query is None:
            return self.dropout(x_BTD if self.norm is None else self.norm(x_BTD), layout), None
        return x_BTD, self.dropout(g_BQD if self.norm is None else self.norm(g_BQD), query.layout)


class TwoStreamBlock(nn.Module):
    """A transformer block that both streams go through with the same weights; both look at the content alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        initial, residual = initialiser(config, "encoder"), RESIDUALS.get(config.norm_position)
        self.attn_residual = residual(config, "attention residual", "encoder")
        self.attn = TwoStreamAttention(config, initial)
        self.ffn_residual = residual(config, "ffn residual", "encoder")
        self.ffn = FFN(config, initial)

    def forward(
        self,
        x_BTD: Tensor,
        g_BQD: Tensor | None,
        table_RD: Tensor,
        content: Stream,
        query: Stream | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The content and, where there is one, the query stream."""
        seen = self.attn.seen(self.attn_residual.before(x_BTD), table_RD)

        def through(y_BQD: Tensor, stream: Stream) -> Tensor:
            z_BQD = self.attn(self.attn_residual.before(y_BQD), seen, stream)
            y_BQD = self.attn_residual.after(y_BQD, z_BQD, stream.layout)
            z_BQD = self.ffn(self.ffn_residual.before(y_BQD), stream.layout)
            return self.ffn_residual.after(y_BQD, z_BQD, stream.layout)

        x_BTD = through(x_BTD, content)
        return x_BTD, None if g_BQD is None or query is None else through(g_BQD, query)


def streams(
    layout: SequenceLayout, segments_BT: Tensor, order_BT: Tensor, places_BQ: Tensor
) -> tuple[Stream, Stream]:
    """The content stream sees tokens up to its own rank, and so itself; the query stream, at `places`, lower ranks."""
    same_B1TS = layout.mask("full")
    allowed_BTS = order_BT[:, None, :] <= order_BT[:, :, None]
    below_BQS = order_BT[:, None, :] < order_BT.gather(1, places_BQ)[:, :, None]
    allowed_B1TS, below_B1QS = allowed_BTS[:, None], below_BQS[:, None]
    if same_B1TS is not None:
        rows_B1QS = places_BQ[:, None, :, None].expand(-1, -1, -1, same_B1TS.shape[-1])
        allowed_B1TS = allowed_B1TS & same_B1TS
        below_B1QS = below_B1QS & same_B1TS.gather(2, rows_B1QS)
    content = _stream(layout, layout.indices.expand_as(order_BT), segments_BT, segments_BT, allowed_B1TS)
    # What is dropped of a query must not be what is dropped of the content at the same place.
    keys = None if layout.keys is None else ~layout.keys
    at_places = SequenceLayout(layout.positions.gather(1, places_BQ), keys=keys)
    at_places.once("indices", lambda: places_BQ)
    return content, _stream(at_places, places_BQ, segments_BT.gather(1, places_BQ), segments_BT, below_B1QS)


def _stream(
    layout: SequenceLayout,
    places_BQ: Tensor,
    of_queries_BQ: Tensor,
    of_keys_BS: Tensor,
    mask_B1QS: Tensor | None,
) -> Stream:
    """Queries at places of their rows, with their segments."""
    n = of_keys_BS.shape[1]
    distances_BQS = places_BQ[:, :, None] - torch.arange(n, device=places_BQ.device) + n - 1
    segments_BQS = (of_queries_BQ[:, :, None] != of_keys_BS[:, None, :]).long()
    return Stream(layout, mask_B1QS, distances_BQS[:, None], segments_BQS[:, None])


def _places(tokens_BT: Tensor, targets_BT: Tensor | None) -> Tensor:
    """Where the query stream runs [B, Q]: at targets, and at others where a row has fewer than the most of any."""
    if targets_BT is None:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    wanted_BT = targets_BT != IGNORE
    most = max(int(wanted_BT.sum(1).max()), 1)
    return (~wanted_BT).long().argsort(dim=1, stable=True)[:, :most]
