"""Normalisation layers, made as `NORMS.get(name)(d_model, eps)`."""

from megatfm.layers.norm.layer_norm import LayerNorm
from megatfm.layers.norm.registry import NORMS, make_norm
from megatfm.layers.norm.rms_norm import RMSNorm, ShardedRMSNorm

__all__ = ["NORMS", "LayerNorm", "RMSNorm", "ShardedRMSNorm", "make_norm"]
