"""Engines carry out steps of a laid-out model: `native` on FSDP2."""

from megatfm.engines.interface import OptimizerGroup, StepStats, Sums
from megatfm.engines.native import NativeEngine

__all__ = ["NativeEngine", "OptimizerGroup", "StepStats", "Sums"]
