"""Engines carry out steps of a laid-out model: `native`, with ZeRO stages 0 to 3."""

from megatfm.engines.interface import OptimizerGroup, StepStats, Sums
from megatfm.engines.native.data_parallel import Sharing
from megatfm.engines.native.engine import NativeEngine

__all__ = ["NativeEngine", "OptimizerGroup", "Sharing", "StepStats", "Sums"]
