"""What is predicted. An objective makes the model's inputs from documents, and names the terms of the loss."""

from megatfm.objectives.causal import Causal
from megatfm.objectives.registry import OBJECTIVES, Batch, Objective, SpecialTokens, Terms

__all__ = ["OBJECTIVES", "Batch", "Causal", "Objective", "SpecialTokens", "Terms"]
