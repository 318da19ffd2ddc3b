"""No position encoding: a causal decoder can still count (Kazemnejad et al. 2023)."""

from megatfm.layers.position.registry import POSITIONS, PositionEncoding

NONE = POSITIONS.register("none")(PositionEncoding())
