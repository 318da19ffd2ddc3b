"""Activations of the feed-forward network."""

from megatfm.layers.activation.registry import ACTIVATIONS, Activation
from megatfm.layers.activation.swiglu import swiglu

__all__ = ["ACTIVATIONS", "Activation", "swiglu"]
