"""Heads of downstream tasks that choose among tokens or texts, as sections of `model.extra_heads`."""

from typing import Literal

from pydantic import Field

from megatfm.config.section import DropProbability, Section


class SpanExtractionHeadConfig(Section):
    """First and last token of an answer in a text (Devlin et al. 2019, section 4.2)."""

    name: Literal["span_extraction"] = "span_extraction"
    bias: bool = True
    """A bias for the first and for the last token."""
    dropout: DropProbability = 0.0
    """Share of the hidden vectors' channels that training drops."""


class MultipleChoiceHeadConfig(Section):
    """A score for each choice, from one token of the text with that choice (Devlin et al. 2019, section 4.4)."""

    name: Literal["multiple_choice"] = "multiple_choice"
    pooler: Literal["tanh", "none"] = "tanh"
    """BERT's dense layer and tanh before the score, or the hidden vector as it is."""
    token: Literal["first", "last"] = "first"
    """Which token of a row stands for it where a batch has no targets: the last in decoders."""
    bias: bool = True
    """A bias of the score, which changes no choice: BERT's has one."""
    dropout: DropProbability = Field(default=0.1)
    """Share of the pooled vector's channels that training drops."""
