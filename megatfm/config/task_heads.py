"""Heads of downstream tasks, as sections of `model.extra_heads`."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatfm.config.section import MAX_WIDTH, DropProbability, Section

PoolerName = Literal["tanh", "gelu", "activation", "transform", "none"]
"""tanh, gelu: a dense layer and this function (BERT; DeBERTa, ELECTRA). activation: a dense layer and the blocks'
activation (BigBird). transform: those and a norm, as before the vocabulary (ModernBERT). none: the hidden vector as it
is."""


class TextClassifierHeadConfig(Section):
    """Classes of texts, from one token of each text, or of every token."""

    name: Literal["text_classifier"] = "text_classifier"
    classes: PositiveInt = Field(default=2, le=MAX_WIDTH)
    """Number of classes."""
    layers: list[int] = Field(default_factory=list, examples=[[-4, -3, -2, -1]])
    """Layers whose vectors are concatenated: 0 the embeddings, 1 the first block, −1 the last; left out, the vectors
    after the stack."""
    pooler: PoolerName = "tanh"
    """Layers before the classes."""
    pooler_bias: bool = True
    """A bias of the pooler's dense layer; ModernBERT has none."""
    loss: Literal["cross_entropy", "binary_cross_entropy", "squared_error"] = "cross_entropy"
    """Loss: one of several classes, any number of classes, or numbers."""
    class_weights: list[PositiveFloat] = Field(default_factory=list, examples=[[0.5, 2.0]])
    """Factor of the loss of each class's examples, for cross_entropy; left out, 1."""
    token: Literal["first", "last", "all"] = "first"
    """Tokens that are classified in a batch without targets: the first, the last (in decoders), or all of them (in
    `tagging`). With targets, those that have a label."""
    bias: bool = True
    """A bias for each class."""
    dropout: DropProbability = 0.1
    """Share of the pooled vector's channels that training drops."""
    both_orders: bool = False
    """Add the vectors of both orders of a pair (Radford et al. 2018, section 3.3)."""

    @model_validator(mode="after")
    def _weights_are_of_classes(self) -> Self:
        if self.class_weights and (self.loss != "cross_entropy" or len(self.class_weights) != self.classes):
            raise ValueError(
                f"class_weights = {self.class_weights} with classes = {self.classes} and loss = {self.loss!r}: give a "
                "weight for each class of loss = 'cross_entropy', or leave class_weights out"
            )
        return self


class SpanExtractionHeadConfig(Section):
    """First and last token of an answer in a text (Devlin et al. 2019, section 4.2)."""

    name: Literal["span_extraction"] = "span_extraction"
    pooler: PoolerName = "none"
    """Layers before both logits."""
    pooler_bias: bool = True
    """A bias of the pooler's dense layer; ModernBERT has none."""
    bias: bool = True
    """A bias for the first and for the last token."""
    dropout: DropProbability = 0.0
    """Share of the hidden vectors' channels that training drops."""


class MultipleChoiceHeadConfig(Section):
    """A score for each choice, from one token of the text with that choice (Devlin et al. 2019, section 4.4)."""

    name: Literal["multiple_choice"] = "multiple_choice"
    pooler: PoolerName = "tanh"
    """Layers before the score."""
    pooler_bias: bool = True
    """A bias of the pooler's dense layer; ModernBERT has none."""
    token: Literal["first", "last"] = "first"
    """Token of a row that carries the score in a batch without targets: the last in decoders."""
    bias: bool = True
    """A bias of the score, as in BERT; it changes no choice."""
    dropout: DropProbability = Field(default=0.1)
    """Share of the pooled vector's channels that training drops."""
