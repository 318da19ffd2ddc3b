"""The plans of the model families."""

from megatfm.parallel.plan import PLANS
from megatfm.parallel.plans.decoder import DECODER

__all__ = ["DECODER", "PLANS"]
