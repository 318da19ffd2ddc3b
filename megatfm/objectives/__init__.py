"""What is predicted. An objective makes the model's inputs from documents, and names the terms of the loss."""

from megatfm.data import DocumentChunk, Field
from megatfm.objectives.causal import Causal, EncoderDecoderCausal
from megatfm.objectives.denoisers import Denoisers
from megatfm.objectives.masked import Masked
from megatfm.objectives.permutation import Permutation
from megatfm.objectives.prefix import PrefixLM, PrefixSeq2Seq
from megatfm.objectives.registry import (
    DECODER_ONLY,
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    Losses,
    Objective,
    SpecialTokens,
    TokenArray,
    build_objective,
    reads_text,
    target_fraction,
)
from megatfm.objectives.replaced_token import ReplacedToken
from megatfm.objectives.segments import NextSentence, SentenceOrder
from megatfm.objectives.span_boundary import SpanBoundary
from megatfm.objectives.span_corruption import SpanCorruption

__all__ = [
    "DECODER_ONLY",
    "ENCODER_DECODER",
    "OBJECTIVES",
    "Batch",
    "Causal",
    "Denoisers",
    "DocumentChunk",
    "EncoderDecoderCausal",
    "Example",
    "Field",
    "Losses",
    "Masked",
    "NextSentence",
    "Objective",
    "Permutation",
    "PrefixLM",
    "PrefixSeq2Seq",
    "ReplacedToken",
    "SentenceOrder",
    "SpanBoundary",
    "SpanCorruption",
    "SpecialTokens",
    "TokenArray",
    "build_objective",
    "reads_text",
    "target_fraction",
]
