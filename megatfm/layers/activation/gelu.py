"""GELU (Hendrycks & Gimpel 2016): x Φ(x), and its approximation by tanh, which GPT-1 and GPT-2 use."""

import torch.nn.functional as F
from torch import Tensor

from megatfm.layers.activation.registry import ACTIVATIONS, Activation


def gelu_tanh(x: Tensor) -> Tensor:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return F.gelu(x, approximate="tanh")


GELU = ACTIVATIONS.register("gelu")(Activation(F.gelu))
GELU_TANH = ACTIVATIONS.register("gelu_tanh")(Activation(gelu_tanh))
