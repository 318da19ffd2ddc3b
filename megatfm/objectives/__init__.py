"""What is predicted. An objective makes the model's inputs from documents, and names the terms of the loss."""

from megatfm.data import Field, Piece
from megatfm.objectives.causal import Causal, LanguageModel
from megatfm.objectives.denoisers import Denoisers
from megatfm.objectives.masked import Masked
from megatfm.objectives.permutation import Permutation
from megatfm.objectives.prefix import PrefixDecoder, PrefixPair
from megatfm.objectives.registry import (
    OBJECTIVES,
    ONE_SIDE,
    TWO_SIDES,
    Batch,
    Fields,
    Objective,
    SpecialTokens,
    Terms,
    Tokens,
    make,
    predicted_share,
    reads_text,
)
from megatfm.objectives.replaced_token import ReplacedToken
from megatfm.objectives.segments import NextSentence, SentenceOrder
from megatfm.objectives.span_boundary import SpanBoundary
from megatfm.objectives.span_corruption import SpanCorruption

__all__ = [
    "OBJECTIVES",
    "ONE_SIDE",
    "TWO_SIDES",
    "Batch",
    "Causal",
    "Denoisers",
    "Field",
    "Fields",
    "LanguageModel",
    "Masked",
    "NextSentence",
    "Objective",
    "Permutation",
    "Piece",
    "PrefixDecoder",
    "PrefixPair",
    "ReplacedToken",
    "SentenceOrder",
    "SpanBoundary",
    "SpanCorruption",
    "SpecialTokens",
    "Terms",
    "Tokens",
    "make",
    "predicted_share",
    "reads_text",
]
