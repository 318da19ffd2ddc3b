"""Encoder, as BERT, RoBERTa, SpanBERT, ALBERT and DeBERTa."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.boundary import BoundaryHead
from megatfm.layers.embedding import Embedding
from megatfm.layers.head import Head, SentenceHead
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, layout_of

# B batch, T tokens, D model width, V vocabulary, C classes


@MODELS.register("encoder")
class Encoder(nn.Module):
    """A bidirectional stack, a head over the vocabulary, and heads for sentences and span boundaries if wanted."""

    def __init__(self, config: ModelConfig, *, embedding: Embedding | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", "full", embedding=embedding)
        tokens = self.encoder.embedding.tokens
        self.head = Head(config, tokens if config.tie_embeddings else None, sparse=True)
        self.sentence = SentenceHead(config) if config.sentence_classes else None
        self.boundary = BoundaryHead(config, tokens) if config.boundary_head else None

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        sentence_targets: Tensor | None = None,
        span_left: Tensor | None = None,
        span_right: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Output:
        """Run the model on int64 tokens [B, T].

        positions, documents [B, T], keys [B]: as in SequenceLayout. segments [B, T]. targets [B, T]: the tokens that
        were masked, −100 elsewhere; gives `losses` instead of `logits`. sentence_targets: as in SentenceHead.
        span_left, span_right: as in BoundaryHead.
        """
        layout = layout_of(tokens, positions, documents, keys_B=keys)
        hidden_BTD = self.encoder(tokens, layout, segments_BT=segments)
        if targets is None:
            sentence = self.sentence(hidden_BTD) if self.sentence is not None else None
            return Output(hidden_BTD, logits=self.head(hidden_BTD), sentence_logits=sentence)
        losses = {"masked": self.head(hidden_BTD, targets)}
        if self.sentence is not None and sentence_targets is not None:
            losses["sentence"] = self.sentence(hidden_BTD, sentence_targets)
        if self.boundary is not None and span_left is not None:
            losses["boundary"] = self.boundary(hidden_BTD, targets, span_left, span_right)
        return Output(hidden_BTD, losses=losses)
