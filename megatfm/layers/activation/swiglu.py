"""SwiGLU (Shazeer 2020, equation 6): Swish(x W) ⊙ (x V)."""

import torch.nn.functional as F

from megatfm.layers.activation.registry import ACTIVATIONS, Activation

SWIGLU = ACTIVATIONS.register("swiglu")(Activation(F.silu, gated=True))
