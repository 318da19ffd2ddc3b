"""Scaled dot-product attention: a reference, kernels, and the table by which one of them is chosen."""

from megatfm.ops.attention.kernels import KERNELS, AttentionRequest, Kernel, choose
from megatfm.ops.attention.products import AttentionOptions, attention_reference, probabilities, unless_blind
from megatfm.ops.attention.varlen import cu_seqlens_from_documents
from megatfm.ops.attention.visible import CAUSAL_MASK, FULL_MASK, AttentionMask, BuiltinMask, DenseMask

__all__ = [
    "CAUSAL_MASK",
    "FULL_MASK",
    "KERNELS",
    "AttentionMask",
    "AttentionOptions",
    "AttentionRequest",
    "BuiltinMask",
    "DenseMask",
    "Kernel",
    "attention_reference",
    "choose",
    "cu_seqlens_from_documents",
    "probabilities",
    "unless_blind",
]
