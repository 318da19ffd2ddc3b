"""Activations of the feed-forward network."""

from megatfm.layers.activation import clamped_swiglu, geglu, gelu, relu, relu2, swiglu, swish
from megatfm.layers.activation.registry import ACTIVATIONS, Activation

__all__ = ["ACTIVATIONS", "Activation", "clamped_swiglu", "geglu", "gelu", "relu", "relu2", "swiglu", "swish"]
