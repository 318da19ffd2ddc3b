"""Position encodings, made as `POSITIONS.get(name)(config)`; called with queries, keys and the layout."""

from megatfm.layers.position.registry import POSITIONS
from megatfm.layers.position.rope import Rope

__all__ = ["POSITIONS", "Rope"]
