"""Activations of the feed-forward network."""

from megatfm.layers.activation import geglu, gelu, relu, relu2, swiglu, swish
from megatfm.layers.activation.registry import ACTIVATIONS, Activation

__all__ = ["ACTIVATIONS", "Activation", "geglu", "gelu", "relu", "relu2", "swiglu", "swish"]
