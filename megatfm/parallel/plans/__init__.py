"""The plans of the model families."""

from megatfm.parallel.plan import PLANS
from megatfm.parallel.plans.transformer import DECODER, ELECTRA, ENCODER, ENCODER_DECODER
from megatfm.parallel.plans.xlnet import XLNET

__all__ = ["DECODER", "ELECTRA", "ENCODER", "ENCODER_DECODER", "PLANS", "XLNET"]
