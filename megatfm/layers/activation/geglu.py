"""GeGLU (Shazeer 2020, equation 6): GELU(x W) ⊙ (x V); T5 v1.1 takes the tanh form."""

import torch.nn.functional as F

from megatfm.layers.activation.gelu import gelu_tanh
from megatfm.layers.activation.registry import ACTIVATIONS, Activation

GEGLU = ACTIVATIONS.register("geglu")(Activation(F.gelu, gated=True))
GEGLU_TANH = ACTIVATIONS.register("geglu_tanh")(Activation(gelu_tanh, gated=True))
