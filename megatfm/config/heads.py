"""The output head, and `model.extra_heads`: heads of objectives, of downstream tasks and of plugins."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from megatfm.config.model_parts import WidthFactor
from megatfm.config.parts import ByName, PartName
from megatfm.config.section import MAX_WIDTH, DropProbability, Section


class HeadConfig(Section):
    """The output head over the vocabulary, and the loss on its logits."""

    name: Literal["linear", "transform", "none"] = "linear"
    """linear: a matrix. transform: BERT's dense layer, activation and norm before it. none: other heads only."""
    bias: bool = False
    """A bias for each token of the vocabulary."""
    transform_bias: bool = True
    """A bias in the dense layer of `transform` (ModernBERT: none)."""
    scale: WidthFactor = 1.0
    """Factor on the hidden vectors before the output matrix; `"d_model^-1/2"` follows the width."""
    softcap: PositiveFloat | None = None
    """Logits l become c tanh(l / c) with this c."""
    label_smoothing: DropProbability = 0.0
    """Share of a target's probability that is spread over the vocabulary, in training."""


class SentenceHeadConfig(Section):
    """Classes of sequences, from the first token through a tanh pooler (BERT, ALBERT)."""

    name: Literal["sentence"] = "sentence"
    classes: PositiveInt = Field(default=2, le=MAX_WIDTH)
    """Number of classes."""


class BoundaryHeadConfig(Section):
    """SpanBERT's head, which predicts a span from the tokens around it."""

    name: Literal["boundary"] = "boundary"


class ClassifierHeadConfig(Section):
    """Classes of images, from a class token or a pool over the image's tokens."""

    name: Literal["classifier"] = "classifier"
    n_classes: PositiveInt = Field(examples=[1000], le=MAX_WIDTH)
    """Number of classes."""
    pool: Literal["class", "mean", "class_mean", "attention"] = "class"
    """Input of the classifier: the class token, the mean of the patches, both side by side (DINOv2), or a learned query
    that attends to all of the image's tokens (SigLIP)."""
    hidden: bool = False
    """A dense layer and tanh before the classifier (ViT's pretraining head)."""
    label_smoothing: DropProbability = 0.0
    """Share of a label's probability that is spread over the classes, in training."""
    bias: bool = True
    """A bias for each class."""


class PixelsHeadConfig(Section):
    """Pixels under each token of the last map, by one linear layer (SimMIM; Xie et al. 2022)."""

    name: Literal["pixels"] = "pixels"
    stride: PositiveInt = Field(default=32, le=MAX_WIDTH)
    """Side in pixels of the square that a token predicts: the patch's, doubled with each further stage."""


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


class PluginHeadConfig(Section):
    """A head that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("head (model.extra_heads)")] = Field(examples=["my_head"])
    """The name under which it is registered; left out, that of the table."""


def _with_table_name(heads: Any) -> Any:
    """Use a table's key as the head's name, unless the table has a `name`."""
    if not isinstance(heads, Mapping):
        return heads
    return {
        key: {"name": key, **section} if isinstance(section, Mapping) else section for key, section in heads.items()
    }


HeadSection = Annotated[
    SentenceHeadConfig
    | BoundaryHeadConfig
    | ClassifierHeadConfig
    | PixelsHeadConfig
    | TextClassifierHeadConfig
    | SpanExtractionHeadConfig
    | MultipleChoiceHeadConfig
    | PluginHeadConfig,
    ByName(),
]
HeadsConfig = Annotated[dict[str, HeadSection], BeforeValidator(_with_table_name)]
