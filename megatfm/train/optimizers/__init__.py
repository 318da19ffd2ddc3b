"""Optimizers by name: each turns its config section into groups of parameters."""

from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.muon import muon
from megatfm.train.optimizers.registry import OPTIMIZERS, Shapes

__all__ = ["OPTIMIZERS", "Shapes", "adamw", "muon"]
