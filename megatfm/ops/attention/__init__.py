"""Scaled dot-product attention: a reference, kernels, and the table by which one of them is chosen."""

from megatfm.ops.attention.kernels import KERNELS, Case, Kernel, choose
from megatfm.ops.attention.products import Variant, attention_reference, probabilities, unless_blind
from megatfm.ops.attention.varlen import sequence_starts
from megatfm.ops.attention.visible import ALL, CAUSAL, Given, Plain, Visible

__all__ = [
    "ALL",
    "CAUSAL",
    "KERNELS",
    "Case",
    "Given",
    "Kernel",
    "Plain",
    "Variant",
    "Visible",
    "attention_reference",
    "choose",
    "probabilities",
    "sequence_starts",
    "unless_blind",
]
