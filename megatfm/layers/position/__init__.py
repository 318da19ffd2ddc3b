"""Position encodings: what each of them does and where, by name."""

from megatfm.layers.position import (
    alibi,
    disentangled,
    disentangled_buckets,
    learned,
    none,
    shaw,
    sinusoidal,
    t5,
    transformer_xl,
)
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.position.rope import Rope

__all__ = [
    "POSITIONS",
    "PositionEncoding",
    "Rope",
    "alibi",
    "disentangled",
    "disentangled_buckets",
    "learned",
    "none",
    "shaw",
    "sinusoidal",
    "t5",
    "transformer_xl",
]
