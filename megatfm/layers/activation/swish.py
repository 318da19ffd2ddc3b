"""Swish, also called SiLU (Ramachandran et al. 2017): x sigmoid(x)."""

import torch.nn.functional as F

from megatfm.layers.activation.registry import ACTIVATIONS, Activation

SWISH = ACTIVATIONS.register("swish")(Activation(F.silu))
