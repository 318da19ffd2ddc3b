"""Engines carry out steps of a laid-out model: `native`, with ZeRO stages 0 to 3."""

from megatfm.engines.data_parallel import Sharing
from megatfm.engines.interface import OptimizerGroup, StepStats, Sums
from megatfm.engines.native import NativeEngine

__all__ = ["NativeEngine", "OptimizerGroup", "Sharing", "StepStats", "Sums"]
