"""No position encoding: a causal decoder can still count (Kazemnejad et al. 2023)."""

from megatfm.layers.position.registry import POSITIONS, Position

NONE = POSITIONS.register("none")(Position())
