"""What is predicted. An objective makes the model's inputs from documents, and names the terms of the loss."""

from megatfm.objectives.causal import Causal
from megatfm.objectives.masked import Masked
from megatfm.objectives.registry import (
    OBJECTIVES,
    ONE_SIDE,
    TWO_SIDES,
    Batch,
    Fields,
    Objective,
    Partners,
    SpecialTokens,
    Terms,
    Tokens,
    make,
    run,
)
from megatfm.objectives.span_corruption import SpanCorruption

__all__ = [
    "OBJECTIVES",
    "ONE_SIDE",
    "TWO_SIDES",
    "Batch",
    "Causal",
    "Fields",
    "Masked",
    "Objective",
    "Partners",
    "SpanCorruption",
    "SpecialTokens",
    "Terms",
    "Tokens",
    "make",
    "run",
]
