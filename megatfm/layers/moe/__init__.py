"""Mixtures of experts: a router chooses which experts a token goes through, and with which weights."""

from megatfm.layers.moe import moe, routers
from megatfm.layers.moe.routers import ROUTERS

__all__ = ["ROUTERS", "moe", "routers"]
