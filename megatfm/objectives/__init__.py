"""Training objectives: from documents to inputs, targets and loss terms. Importing them registers them."""

from megatfm.objectives import contrastive as contrastive
from megatfm.objectives import denoising as denoising
from megatfm.objectives import image_to_text as image_to_text
from megatfm.objectives import images as images
from megatfm.objectives import masked as masked
from megatfm.objectives import masked_image as masked_image
from megatfm.objectives import supervised as supervised
from megatfm.objectives.base import (
    OBJECTIVES,
    Example,
    Objective,
    SpecialTokens,
    build_objective,
    reads_text,
    target_fraction,
)
from megatfm.objectives.causal import Causal

__all__ = [
    "OBJECTIVES",
    "Causal",
    "Example",
    "Objective",
    "SpecialTokens",
    "build_objective",
    "reads_text",
    "target_fraction",
]
