"""Encoder, as BERT, RoBERTa, SpanBERT, ALBERT and DeBERTa."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.embedding import Embedding
from megatfm.layers.head import Head
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.heads import add_heads
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, StackInputs, sequence_metadata
from megatfm.models.steps import ForwardPass, ModelStep, ModelSteps

# B batch, T tokens, D model width, V vocabulary, C classes


@MODELS.register("encoder")
class Encoder(nn.Module):
    """A bidirectional stack, a head over the vocabulary, and other heads, such as for sentences and span boundaries."""

    context = "alone"

    def __init__(self, config: ModelConfig, *, embedding: Embedding | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", embedding=embedding)
        self.reads = self.encoder.reads
        has_head = config.head.name != "none"
        self.head = Head(config, self.encoder.embedding.tied_table(config), sparse=True) if has_head else None
        self.steps = ModelSteps(
            [
                *self.encoder.steps("encoder", StackInputs(self.sequence)),
                *([ModelStep("head", self._head, uses=("head",), reads=("hidden",))] if self.head else []),
                *add_heads(self, config, self.encoder.embedding.table),
            ]
        )

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], or on what else of `fields` its embedding reads.

        positions, documents [B, T], keys [B]: as in SequenceMetadata. segments [B, T]. targets [B, T]: the tokens that
        were masked, −100 elsewhere; gives `losses` instead of `logits`. fields: what the heads read.
        """
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments, "targets": targets,
            "keys": keys,
        }  # fmt: skip
        batch = ForwardPass({**inputs, **fields})
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def sequence(self, batch: ForwardPass) -> SequenceMetadata:
        """Where the tokens stand; one for all steps."""
        return batch.once("sequence", lambda: self._sequence(batch))

    def _sequence(self, batch: ForwardPass) -> SequenceMetadata:
        return sequence_metadata(
            batch[self.reads],
            batch.get("positions"),
            batch.get("documents"),
            rng_keys_B=batch.get("keys"),
            of_row=batch.of_row(),
            starts=batch.get("cu_seqlens"),
        )

    def _head(self, batch: ForwardPass) -> None:
        assert self.head is not None
        hidden_BTD, targets = batch.carry["hidden"], batch.get("targets")
        if targets is None:
            batch.logits = self.head(hidden_BTD)
        else:
            batch.losses["masked"] = self.head(hidden_BTD, targets)
