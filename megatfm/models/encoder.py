"""Encoder, as BERT, RoBERTa, SpanBERT, ALBERT and DeBERTa."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.boundary import BoundaryHead
from megatfm.layers.embedding import Embedding
from megatfm.layers.head import Head, SentenceHead
from megatfm.layers.sequence import SequenceLayout
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Reads, Stack, layout_of
from megatfm.models.steps import Pass, Step, Steps

# B batch, T tokens, D model width, V vocabulary, C classes


@MODELS.register("encoder")
class Encoder(nn.Module):
    """A bidirectional stack, a head over the vocabulary, and heads for sentences and span boundaries if wanted."""

    def __init__(self, config: ModelConfig, *, embedding: Embedding | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", embedding=embedding)
        tokens = self.encoder.embedding.tokens
        self.head = Head(config, tokens if config.embedding.tied else None, sparse=True)
        self.sentence = SentenceHead(config) if config.sentence_classes else None
        self.boundary = BoundaryHead(config, tokens) if config.boundary_head else None
        self.steps = Steps(
            [
                *self.encoder.steps("encoder", Reads(self.layout)),
                Step("head", self._head, uses=("head",), reads=("hidden",)),
                *(
                    [Step("sentence", self._sentence, uses=("sentence",), reads=("hidden",))]
                    if self.sentence
                    else []
                ),
                *(
                    [Step("boundary", self._boundary, uses=("boundary",), reads=("hidden",))]
                    if self.boundary
                    else []
                ),
            ]
        )

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
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments, "targets": targets,
            "sentence_targets": sentence_targets, "span_left": span_left, "span_right": span_right, "keys": keys,
        }  # fmt: skip
        batch = Pass(inputs)
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def layout(self, batch: Pass) -> SequenceLayout:
        """Where the tokens stand; one for all steps."""
        return batch.once("layout", lambda: self._layout(batch))

    def _layout(self, batch: Pass) -> SequenceLayout:
        return layout_of(
            batch["tokens"], batch.get("positions"), batch.get("documents"), keys_B=batch.get("keys")
        )

    def _head(self, batch: Pass) -> None:
        hidden_BTD, targets = batch.carry["hidden"], batch.get("targets")
        if targets is None:
            batch.logits = self.head(hidden_BTD)
        else:
            batch.losses["masked"] = self.head(hidden_BTD, targets)

    def _sentence(self, batch: Pass) -> None:
        assert self.sentence is not None
        hidden_BTD, targets = batch.carry["hidden"], batch.get("sentence_targets")
        if batch.get("targets") is None:
            batch.sentence_logits = self.sentence(hidden_BTD)
        elif targets is not None:
            batch.losses["sentence"] = self.sentence(hidden_BTD, targets)

    def _boundary(self, batch: Pass) -> None:
        assert self.boundary is not None
        targets, left, right = batch.get("targets"), batch.get("span_left"), batch.get("span_right")
        if targets is not None and left is not None:
            batch.losses["boundary"] = self.boundary(batch.carry["hidden"], targets, left, right)
